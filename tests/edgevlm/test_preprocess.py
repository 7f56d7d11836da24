"""`pixel_values` equal transformers' Pillow processor bit for bit, within a bounded memory."""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    smart_resize as hf_smart_resize,
)

from edgevlm.config import ImageProcessorConfig, ModelConfig
from edgevlm.errors import BadImage
from edgevlm.preprocess import (
    image_grid,
    image_tokens,
    max_patches,
    patchify,
    pixel_values,
    resize_image,
    resized_size,
    smart_resize,
)


@pytest.fixture(scope="module")
def config(model_config: ModelConfig) -> ImageProcessorConfig:
    assert model_config.image_processor is not None
    return model_config.image_processor


def noise(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


SIZES = [
    (1, 1),
    (22, 3),
    (1000, 5),
    (2600, 13),
    (4000, 3000),
    (333, 517),
    (56, 56),
    (1, 22),
    (257, 27),
]
QWEN3_VL = ImageProcessorConfig("smart_resize", 16, 2, 2, 65536, 1 << 20, (0.5,) * 3, (0.5,) * 3)
RANDOM = [tuple(pair) for pair in np.random.default_rng(3).integers(1, 700, (6, 2)).tolist()]


@pytest.mark.parametrize("size", [*SIZES, *(s for s in RANDOM if max(s) / min(s) <= 200)])
def test_pixels_equal_transformers(size: tuple[int, int], config: ImageProcessorConfig) -> None:
    image = noise(*size)
    processor = Qwen2VLImageProcessorPil(
        image_mean=list(config.image_mean), image_std=list(config.image_std)
    )
    expected = processor(image, return_tensors="np", input_data_format="channels_last")
    values, grid = pixel_values(image, config)
    assert values.dtype == np.float32
    assert grid == tuple(expected["image_grid_thw"][0]) == image_grid(config, size)
    assert np.array_equal(values, expected["pixel_values"])


@pytest.mark.parametrize("size", [(1, 1), (1000, 5), (333, 517), (1695, 2187)])
def test_pixels_of_qwen3_vl_equal_transformers(size: tuple[int, int]) -> None:
    """Patches of 16 pixels, values from -1 to 1, at least 256x256 of them."""
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        min_pixels=65536, max_pixels=1 << 20,
    )  # fmt: skip
    expected = processor(noise(*size), return_tensors="np")
    values, grid = pixel_values(noise(*size), QWEN3_VL)
    assert grid == tuple(expected["image_grid_thw"][0])
    assert np.array_equal(values, expected["pixel_values"])


@pytest.mark.parametrize(
    ("size", "resized", "tokens"),
    [((1, 1), (56, 56), 4), ((257, 27), (252, 28), 9), ((28, 26), (84, 56), 6),
     ((1000, 5), (812, 28), 29), ((4000, 3000), (1148, 840), 1230)],
)  # fmt: skip
def test_published_token_counts(
    size: tuple[int, int], resized: tuple[int, int], tokens: int, config: ImageProcessorConfig
) -> None:
    assert resized_size(config, size) == resized
    assert image_tokens(config, size) == tokens


def test_a_ratio_of_200_is_allowed_and_no_more(config: ImageProcessorConfig) -> None:
    assert image_tokens(config, (1000, 5)) == 29
    for size in [(1093, 5), (5, 1093), (1001, 5)]:
        with pytest.raises(BadImage, match=r"over 200 times"):
            image_tokens(config, size)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([28, 32]), st.integers(1, 3000))
def test_sizes_equal_transformers(height: int, width: int, factor: int, cap: int) -> None:
    limits = (56 * 56, cap * factor**2 + 56 * 56)
    if max(height, width) / min(height, width) > 200:
        with pytest.raises(BadImage):
            smart_resize(height, width, factor, *limits)
    else:
        expected = hf_smart_resize(height, width, factor, *limits)
        assert smart_resize(height, width, factor, *limits) == expected


@pytest.mark.parametrize(
    ("low", "high"), [(4, 4), (4, 16), (4, 100), (4, 199), (4, 1280), (256, 1280), (50, 60)]
)
def test_no_picture_has_more_patches_than_the_plan_is_told(
    low: int, high: int, config: ImageProcessorConfig
) -> None:
    config = replace(config, min_pixels=low * 784, max_pixels=high * 784)
    bound = max_patches(config)
    worst = 0
    for ratio in np.geomspace(1, 200, 120):
        for short in (1, 3, 5, 13, 14, 20, 27, 40, 57, 113, 300, 1000):
            size = (min(math.floor(short * ratio), 200 * short), short)
            t, h, w = image_grid(config, size)
            worst = max(worst, t * h * w)
    assert worst <= bound <= 2.5 * worst
    if low * 10 < high > 200:
        assert bound == high * 4


def test_pixels_go_straight_into_the_planned_buffer(config: ImageProcessorConfig) -> None:
    plan = np.full((5120, 1176), np.nan, np.float32)
    image = noise(1600, 1200)
    patches = math.prod(image_grid(config, image.size))
    resized = resize_image(image, config)
    patchify(resized, config)
    tracemalloc.start()
    values, _ = patchify(resized, config, plan[:patches])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.shares_memory(values, plan) and np.isnan(plan[patches:]).all()
    assert np.array_equal(values, pixel_values(image, config)[0])
    # A band of 28 rows, as bytes and as one float channel with its index; never the whole picture.
    assert peak < 28 * resized.width * (3 + 3 + 4 + 8) + 20_000 < values.nbytes / 20


def test_a_half_precision_buffer_is_filled_by_rounding(config: ImageProcessorConfig) -> None:
    image = noise(60, 60)
    exact, _ = pixel_values(image, config)
    half, _ = pixel_values(image, config, np.empty(exact.shape, np.float16))
    assert np.array_equal(half, exact.astype(np.float16))


def test_a_buffer_of_another_shape_is_our_bug(config: ImageProcessorConfig) -> None:
    with pytest.raises(ValueError, match="expected C-contiguous"):
        pixel_values(noise(56, 56), config, np.empty((4, 1176), np.float32))


def test_a_picture_of_the_right_size_is_not_resized(config: ImageProcessorConfig) -> None:
    image = noise(84, 56)
    assert resize_image(image, config) is image
