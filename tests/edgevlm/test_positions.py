"""Angles, M-RoPE positions and windows equal transformers'."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen25
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from edgevlm.config import Llama3RopeScaling, ModelConfig, RopeConfig, TextConfig, VisionConfig
from edgevlm.positions import (
    ImageRun,
    inverse_frequencies,
    learned_positions,
    max_windows,
    mrope_positions,
    rope_rows,
    vision_rope,
    vision_windows,
)

VISION = VisionConfig("qwen2_5_vl", 4, 80, 2, 96, 64, "silu", 3, 14, 2, 2, 112, (3,))
GRIDS = [(1, 4, 4), (1, 2, 58), (1, 60, 82), (1, 16, 24), (1, 18, 8), (1, 2, 2), (2, 10, 6)]


@pytest.fixture(scope="module")
def text(model_config: ModelConfig) -> TextConfig:
    return model_config.text


def test_plain_rope_equals_llama(text: TextConfig) -> None:
    text = replace(text, rope=RopeConfig(10000.0))
    hf = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4)
    hf.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    check_llama(text, hf)


def test_llama3_scaling_equals_transformers(text: TextConfig) -> None:
    scaling = Llama3RopeScaling(32.0, 1.0, 4.0, 8192)
    text = replace(text, rope=RopeConfig(500000.0, scaling=scaling), head_dim=64)
    hf = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=131072
    )
    hf.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    check_llama(text, hf)
    plain = inverse_frequencies(RopeConfig(500000.0), 64)
    ratio = plain / inverse_frequencies(text.rope, 64)
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(32) and ((1 < ratio) & (ratio < 32)).any()


def check_llama(text: TextConfig, hf: transformers.LlamaConfig) -> None:
    """Two libraries' powers differ in the last bit, which far positions would multiply."""
    positions = np.array([[0, 1, 2, 7, 77, 200]])
    rotary = LlamaRotaryEmbedding(hf)
    half = text.head_dim // 2
    expected = rotary(torch.zeros(1), torch.from_numpy(positions))
    frequencies = inverse_frequencies(text.rope, text.head_dim)
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=5e-7)
    for ours, theirs in zip(rope_rows(positions, text), expected, strict=True):
        assert ours.dtype == np.float32 and ours.shape == (6, half)
        np.testing.assert_allclose(ours, theirs[0, :, :half].numpy(), atol=1e-4)


def test_mrope_sections_take_their_own_axis(text: TextConfig) -> None:
    hf = transformers.Qwen2VLConfig().text_config
    hf.hidden_size, hf.num_attention_heads = 64, 4
    hf.rope_parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    positions = np.array([[0, 5, 900], [0, 17, 30], [0, 3, 11]])  # t != h != w: text hides a mix-up
    expected = qwen2.Qwen2VLRotaryEmbedding(hf)(
        torch.zeros(1), torch.from_numpy(positions)[:, None]
    )
    for ours, theirs in zip(rope_rows(positions, text), expected, strict=True):
        np.testing.assert_allclose(ours, theirs.reshape(3, 16)[:, :8].numpy(), atol=5e-4)


def test_interleaved_axes_take_turns(text: TextConfig) -> None:
    """t h w t h w ..., and t has what the shorter sections leave."""
    hf = transformers.Qwen3VLTextConfig(hidden_size=64, num_attention_heads=4, head_dim=32)
    sections = (6, 5, 5)
    hf.rope_parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [*sections]}
    rope = RopeConfig(1e6, "mrope_interleaved", sections)
    positions = np.array([[0, 5, 900], [0, 17, 30], [0, 3, 11]])
    expected = qwen3.Qwen3VLTextRotaryEmbedding(hf)(
        torch.zeros(1), torch.from_numpy(positions)[:, None]
    )
    ours = rope_rows(positions, replace(text, rope=rope, head_dim=32))
    for found, theirs in zip(ours, expected, strict=True):
        np.testing.assert_allclose(found, theirs[0, :, :16].numpy(), atol=5e-4)


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 2, 58), (1, 40, 6), (1, 18, 26), (1, 48, 48)])
def test_learned_positions_equal_transformers(grid: tuple[int, int, int]) -> None:
    vision = replace(VISION, num_position_embeddings=36)
    index, weight = learned_positions(grid, vision)
    rows, shares = get_vision_interpolation_indices_and_weights(
        torch.tensor([grid]), 6, align_corners=True, spatial_merge_size=2
    )
    table = np.random.default_rng(1).standard_normal(36)
    found = (table[index] * weight).sum(axis=1)
    np.testing.assert_allclose(found, (table[rows.numpy()] * shares.numpy()).sum(1), atol=1e-5)
    assert weight.dtype == np.float32 and index.shape == weight.shape == (grid[1] * grid[2], 4)
    np.testing.assert_allclose(weight.sum(axis=1), 1, atol=1e-6)


def test_of_text_alone_one_axis_is_enough(text: TextConfig) -> None:
    row = np.arange(9)[None]
    for one, three in zip(rope_rows(row, text), rope_rows(np.tile(row, (3, 1)), text), strict=True):
        assert np.array_equal(one, three)


def test_published_mrope_rows() -> None:
    positions, delta = mrope_positions(
        16, [ImageRun(3, 4, 0), ImageRun(10, 4, 1)], [(1, 4, 4)] * 2, 2
    )
    assert positions.tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 5, 6, 7, 8, 8, 8, 8, 10, 11],
        [0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 9, 9, 10, 11],
        [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9, 8, 9, 10, 11],
    ]
    assert delta == -4
    positions, delta = mrope_positions(9, [ImageRun(2, 6, 0)], [(1, 4, 6)], 2)
    assert positions[:, 2:].tolist() == [
        [2, 2, 2, 2, 2, 2, 5],
        [2, 2, 2, 3, 3, 3, 5],
        [2, 3, 4, 2, 3, 4, 5],
    ]
    assert delta == -3


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("model", [qwen2.Qwen2VLModel, qwen25.Qwen2_5_VLModel, qwen3.Qwen3VLModel])
def test_mrope_equals_transformers(seed: int, model: type) -> None:
    rng = np.random.default_rng(seed)
    grids = [(1, 2 * int(h), 2 * int(w)) for h, w in rng.integers(1, 9, (seed % 4, 2))]
    runs, kinds = [], [0] * int(rng.integers(1, 6))
    for i, (_, h, w) in enumerate(grids):
        runs.append(ImageRun(len(kinds), h * w // 4, i))
        kinds += [1] * (h * w // 4) + [0] * int(rng.integers(1, 6))
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    fake = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    fake.get_vision_position_ids = model.get_vision_position_ids.__get__(fake)
    types = torch.tensor([kinds])
    expected, deltas = model.get_rope_index(
        fake, types, types, torch.tensor(grids) if grids else None
    )
    positions, delta = mrope_positions(len(kinds), runs, grids, 2)
    assert np.array_equal(positions, expected[:, 0].numpy()) and delta == int(deltas)


def test_a_run_that_does_not_fit_its_grid_is_our_bug() -> None:
    with pytest.raises(ValueError, match="image 0 has 4 features, its run 5"):
        mrope_positions(8, [ImageRun(1, 5, 0)], [(1, 4, 4)], 2)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    "family", [qwen2.Qwen2VLVisionRotaryEmbedding, qwen25.Qwen2_5_VLVisionRotaryEmbedding]
)
def test_vision_rope_equals_transformers(grid: tuple[int, int, int], family: type) -> None:
    hf = SimpleNamespace(
        rope_parameters={"rope_type": "axial", "rope_theta": 10000.0},
        embed_dim=80, hidden_size=80, num_attention_heads=2, num_heads=2, head_dim=40,
    )  # fmt: skip
    ids = get_vision_position_ids(torch.tensor([grid]), 2)
    expected = family(hf)(torch.zeros(1), ids)
    for ours, theirs in zip(vision_rope(grid, VISION), expected, strict=True):
        assert ours.dtype == np.float32 and ours.shape == (len(ids), 20)
        np.testing.assert_allclose(ours, theirs.numpy()[:, :20], atol=2e-6)


@pytest.mark.parametrize("grid", GRIDS)
def test_windows_group_the_same_patches_as_transformers(grid: tuple[int, int, int]) -> None:
    index, lengths = get_vision_window_index(torch.tensor([grid]), 2, 112, 14)
    rows = (index[:, None] * 4 + torch.arange(4)).flatten().tolist()
    cuts = lengths.tolist()
    expected = {frozenset(rows[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)}
    windows = vision_windows(grid, VISION)
    placed = windows.window_index.reshape(windows.window_mask.shape)
    assert windows.window_mask.shape[1] == 64
    ours = {
        frozenset(row[mask].tolist()) for row, mask in zip(placed, windows.window_mask, strict=True)
    }
    assert ours == expected and len(windows.window_mask) == len(expected)
    assert (placed[~windows.window_mask] == 0).all()
    # Gather into windows, scatter back: every patch returns to its row.
    patches = np.prod(grid)
    assert np.array_equal(windows.window_index[windows.window_position], np.arange(patches))
    assert windows.window_mask.sum() == patches


@pytest.mark.parametrize("limit", [None, 3, 200])
def test_the_plan_knows_the_most_windows(limit: int | None) -> None:
    for units in (1, 3, 4, 5, 16, 17, 47, 84, 85, 120):
        found = 0
        for a in range(1, units + 1):
            for b in range(1, units // a + 1):
                low, high = min(a, b), max(a, b)
                if limit is None or high <= limit * (low + 1) + 1:
                    found = max(found, len(vision_windows((1, 2 * a, 2 * b), VISION).window_mask))
        assert max_windows(VISION, 4 * units, limit) == found
    assert max_windows(VISION, 5120) == 320 and max_windows(VISION, 5120, 200) == 151


def test_every_picture_fits_the_windows_of_the_plan(model_config: ModelConfig) -> None:
    from edgevlm.preprocess import image_grid, max_patches

    assert model_config.image_processor is not None
    for high in (100, 1280):
        config = replace(model_config.image_processor, max_pixels=high * 784)
        plan = max_windows(VISION, max_patches(config), 200)
        sizes = [
            (s * r, s) for s in (1, 5, 14, 15, 41, 70, 333, 2000) for r in (1, 7, 50, 150, 199, 200)
        ]
        for size in sizes:
            assert len(vision_windows(image_grid(config, size), VISION).window_mask) <= plan
