import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.quantize import (
    QuantizedWeight,
    check_fp16_range,
    choose_group_size,
    kept_16bit_reason,
    quantize,
)
from edgevlm.errors import UnsupportedCheckpoint


def normal(n, k, seed=0):
    return np.random.default_rng(seed).standard_normal((n, k), np.float32) * np.float32(0.02)


def plain_error(weight, group_size):
    """Squared error per group of absmax / 7 with the scale in fp16: the textbook's rounding."""
    groups = weight.reshape(len(weight), -1, group_size).astype(np.float64)
    scale = (np.abs(groups).max(-1).astype(np.float32) / np.float32(7)).astype(np.float16)
    scale = scale.astype(np.float64)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(scale > 0, np.clip(np.rint(groups / scale), -8, 7), 0)
    return ((codes * scale - groups) ** 2).sum(-1)


def found_error(weight, quantized):
    difference = quantized.dequantize().astype(np.float64) - weight
    return (difference.reshape(len(weight), -1, quantized.group_size) ** 2).sum(-1)


def test_layout_low_nibble_first_and_eight_is_zero():
    weight = np.zeros((1, 32), np.float32)
    weight[0, :4] = 7, -7, 3, 0  # the scale is 1 and every value lies on a code
    quantized = quantize(weight, 32)
    assert quantized.scales.dtype == np.float16 and quantized.scales[0, 0] == 1
    assert quantized.codes.dtype == np.uint8 and quantized.codes.shape == (1, 16)
    assert quantized.codes[0, :3].tolist() == [15 | 1 << 4, 11 | 8 << 4, 8 | 8 << 4]
    assert np.array_equal(quantized.dequantize(), weight)
    assert quantized.shape == (1, 32) and quantized.nbytes == 16 + 2


def test_code_minus_eight_is_used():
    weight = np.zeros((1, 32), np.float32)
    weight[0, :3] = -8, 3, 5
    assert np.array_equal(quantize(weight, 32).dequantize(), weight)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_search_beats_plain_rounding_on_normal_weights(group_size):
    weight = normal(64, 512)
    ratio = found_error(weight, quantize(weight, group_size)).sum()
    ratio /= plain_error(weight, group_size).sum()
    assert ratio < {32: 0.90, 64: 0.85, 128: 0.82}[group_size]


def test_codes_are_the_nearest_to_the_stored_scale():
    weight = normal(16, 256)
    quantized = quantize(weight, 128)
    scale = np.repeat(quantized.scales.astype(np.float64), 128, axis=1)
    expected = np.clip(np.rint(weight / scale), -8, 7) + 8
    assert np.array_equal(quantized.codes & 15, expected[:, 0::2])
    assert np.array_equal(quantized.codes >> 4, expected[:, 1::2])


VALUES = st.floats(-100, 100, width=32) | st.floats(-(2**-20), 2**-20, width=32) | st.just(0.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(VALUES, min_size=64, max_size=64), st.sampled_from([1e-6, 1e-3, 1.0, 100.0]))
def test_no_group_is_worse_than_plain_rounding(values, factor):
    weight = np.array(values, np.float32).reshape(1, 64) * np.float32(factor)
    quantized = quantize(weight, 32)
    plain = plain_error(weight, 32)
    # float32 sums in the search, float64 here
    assert (found_error(weight, quantized) <= plain * (1 + 1e-4) + 1e-30).all()


def test_zero_groups_and_tiny_groups_are_safe():
    weight = np.zeros((3, 64), np.float32)
    weight[1] = 1e-9  # its scale is below fp16
    weight[2, 32:] = 1e-5  # its scale is an fp16 subnormal
    quantized = quantize(weight, 32)
    dequantized = quantized.dequantize()
    assert not dequantized[:2].any() and (quantized.codes[:2] == 0x88).all()
    assert np.allclose(dequantized[2, 32:], 1e-5, rtol=0.05)


def test_bands_do_not_show(monkeypatch):
    weight = normal(50, 256)
    whole = quantize(weight, 64)
    monkeypatch.setattr("builders.quantize.BAND", 256 * 7)
    banded = quantize(weight, 64)
    assert np.array_equal(whole.codes, banded.codes)
    assert np.array_equal(whole.scales, banded.scales)


def test_rows_of_any_stride():
    weight = normal(8, 256)
    turned = np.asfortranarray(weight)
    assert np.array_equal(quantize(turned, 64).codes, quantize(weight, 64).codes)


def test_concatenate_rows():
    q, k = normal(4, 64, 1), normal(2, 64, 2)
    joined = QuantizedWeight.concatenate([quantize(q, 32), quantize(k, 32)])
    whole = quantize(np.concatenate([q, k]), 32)
    assert joined.shape == (6, 64)
    assert np.array_equal(joined.dequantize(), whole.dequantize())
    with pytest.raises(ValueError, match="group_size"):
        QuantizedWeight.concatenate([quantize(q, 32), quantize(k, 64)])


@pytest.mark.parametrize("group_size", [128, 3])
def test_group_size_must_divide(group_size):
    with pytest.raises(ValueError, match="does not divide"):
        quantize(normal(2, 96), group_size)


@pytest.mark.parametrize(
    ("k", "wanted", "expected"),
    [
        (11008, 128, 128),
        (8960, 128, 128),
        (18944, 128, 128),
        (14784, 128, 64),
        (14784, 64, 64),
        (896, 128, 128),
        (576, 128, 64),
        (96, 64, 32),
        (3420, 128, None),
        (3420, 64, None),
        (4304, 128, None),
        (64, 32, 32),
    ],
)
def test_choose_group_size(k, wanted, expected):
    assert choose_group_size(k, wanted) == expected


def test_kept_16bit_reason():
    assert kept_16bit_reason(3420, 128) == "input size 3420 is not a multiple of 128 or 64 or 32"


@pytest.mark.parametrize("value", [70000.0, -70000.0, np.inf, np.nan])
def test_fp16_range_names_the_tensor(value):
    weight = normal(2, 64)
    check_fp16_range(weight, "fine")
    weight[1, 3] = value
    with pytest.raises(UnsupportedCheckpoint, match=r"'down_proj'.*65504"):
        check_fp16_range(weight, "down_proj")
    with pytest.raises(UnsupportedCheckpoint, match="'down_proj'"):
        quantize(weight, 64, "down_proj")


def test_largest_fp16_values_do_not_overflow_when_dequantized():
    weight = np.full((1, 64), -65504, np.float32)
    weight[0, 32:] = 65504
    assert np.abs(quantize(weight, 32).dequantize()).max() <= 65504
