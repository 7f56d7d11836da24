"""Where tokens and patches stand: rotary angles of text and tower, M-RoPE, attention windows.

Pure numpy on shapes and ids; knows nothing about weights, pictures or prompts. Formulas are
transformers' (`modeling_rope_utils`, `qwen2_vl.get_rope_index`,
`vision_utils.get_vision_window_index`).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.config import Llama3RopeScaling, RopeConfig, TextConfig, VisionConfig

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Grid = tuple[int, int, int]  # (t, h, w) in patches

VISION_ROPE_THETA = 10000.0


class ImageRun(NamedTuple):
    """Prompt rows `start` to `start + length` are the features of image number `image`."""

    start: int
    length: int
    image: int


@dataclass(frozen=True, eq=False)
class Windows:
    """One picture's attention windows, padded to P = (window_size / patch_size)^2 places each.

    | field           | shape, dtype            | meaning                                     |
    |-----------------|-------------------------|---------------------------------------------|
    | window_index    | [num_windows * P] int64 | patch row in each place; 0 where padded     |
    | window_mask     | [num_windows, P] bool   | True where the place holds a patch          |
    | window_position | [num_patches] int64     | place of each patch, inverse of window_index |
    """

    window_index: I64
    window_mask: NDArray[np.bool_]
    window_position: I64


@functools.lru_cache(maxsize=8)
def inverse_frequencies(rope: RopeConfig, head_dim: int) -> F32:
    """[head_dim / 2] float32, in radians per position; read-only."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies: F32 = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.scaling is not None:
        frequencies = _llama3(frequencies, rope.scaling)
    frequencies.flags.writeable = False
    return frequencies


def _llama3(frequencies: F32, scaling: Llama3RopeScaling) -> F32:
    """Divide long wavelengths by `factor`, blend middle ones (`_compute_llama3_parameters`)."""
    old_length = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequencies
    smooth = (old_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    long = wavelength > old_length / scaling.low_freq_factor
    short = wavelength < old_length / scaling.high_freq_factor
    scaled = np.where(long, frequencies / scaling.factor, np.where(short, frequencies, blended))
    return scaled.astype(np.float32)


def rope_rows(positions: NDArray[np.integer[Any]], config: TextConfig) -> tuple[F32, F32]:
    """cos and sin, each [n, head_dim / 2] float32, of positions [1, n] or [3, n] (t, h, w).

    "mrope": frequencies are cut into `mrope_section`; section i turns by axis i (contiguous, as
    Qwen2-VL). "mrope_interleaved": axes take turns, t h w t h w ..., and t has the rest (Qwen3-VL).
    """
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    place = positions.astype(np.float32)
    sections = config.rope.mrope_section
    if config.rope.scheme == "plain" or sections is None or len(positions) == 1:
        angles = place[0, :, None] * frequencies
    else:
        axis = _axis_of_frequency(sections, config.rope.scheme == "mrope_interleaved")
        angles = place.T[:, axis] * frequencies
    return np.cos(angles), np.sin(angles)


def _axis_of_frequency(sections: tuple[int, ...], interleaved: bool) -> I64:
    """[head_dim / 2]: which of t, h, w each frequency turns by."""
    if not interleaved:
        return np.repeat(np.arange(len(sections)) % 3, sections)
    axis = np.zeros(sum(sections), np.int64)
    for other in (1, 2):
        axis[other : 3 * sections[other] : 3] = other
    return axis


def plain_positions(length: int) -> I64:
    """[1, length] int64: 0, 1, 2, ..."""
    return np.arange(length, dtype=np.int64)[None]


def mrope_positions(
    length: int, image_runs: Sequence[ImageRun], grids: Sequence[Grid], merge: int
) -> tuple[I64, int]:
    """Positions [3, length] int64 (t, h, w); delta: a later token's position is its index + delta.

    `grids` are in patches, one per image number. Text after a picture goes on after its longer
    side.
    """
    positions = np.empty((3, length), np.int64)
    index, position = 0, 0
    for run in image_runs:
        text = run.start - index
        positions[:, index : run.start] = np.arange(position, position + text)
        position += text
        t, h, w = grids[run.image]
        h, w = h // merge, w // merge
        if t * h * w != run.length:
            raise ValueError(f"image {run.image} has {t * h * w} features, its run {run.length}")
        index = run.start + run.length
        axes = np.indices((t, h, w)).reshape(3, -1)
        positions[:, run.start : index] = axes + position
        position += max(h, w)
    positions[:, index:] = np.arange(position, position + length - index)
    return positions, position + (length - index) - length


def vision_rope(grid: Grid, config: VisionConfig) -> tuple[F32, F32]:
    """cos and sin, each [num_patches, head_dim / 2] float32, in the order of `pixel_values`.

    The first half of a row turns by the patch's row, the second by its column.
    """
    spatial_dim = config.head_dim // 2
    exponent = np.arange(0, spatial_dim, 2, dtype=np.float32) / np.float32(spatial_dim)
    frequencies = (1.0 / np.float32(VISION_ROPE_THETA) ** exponent).astype(np.float32)
    places = _patch_places(grid, config.spatial_merge_size).astype(np.float32)
    angles = (places[:, :, None] * frequencies).reshape(len(places), -1)
    return np.cos(angles), np.sin(angles)


def learned_positions(grid: Grid, config: VisionConfig) -> tuple[I64, F32]:
    """Rows of the learned table around each patch, and their weights: each [num_patches, 4].

    Bilinear with the corners of table and picture on each other (transformers'
    `get_vision_interpolation_indices_and_weights`), in the order of `pixel_values`.
    """
    assert config.num_position_embeddings is not None
    side = math.isqrt(config.num_position_embeddings)
    taps, shares = [], []
    for place, length in zip(
        _patch_places(grid, config.spatial_merge_size).T, grid[1:], strict=True
    ):
        source = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(length - 1, 1))
        low = np.floor(source)
        taps.append(np.minimum(np.stack([low, low + 1]).astype(np.int64), side - 1))
        shares.append(np.stack([1 - (source - low), source - low]))
    index = taps[0][:, None] * side + taps[1][None]  # [2, 2, num_patches]
    weight = shares[0][:, None] * shares[1][None]
    return index.reshape(4, -1).T, weight.astype(np.float32).reshape(4, -1).T


def _patch_places(grid: Grid, merge: int) -> I64:
    """[num_patches, 2] int64: row and column of each patch, in merged-block order."""
    t, h, w = grid
    places = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
    ordered = places.transpose(1, 3, 2, 4, 0).reshape(h * w, 2)
    return np.tile(ordered, (t, 1)).astype(np.int64)


def vision_windows(grid: Grid, config: VisionConfig) -> Windows:
    """The windows of one picture. Patches keep their order; windows are gathered from it."""
    side = _window_side(config) * config.spatial_merge_size  # in patches
    t, h, w = grid
    across, down = -(-w // side), -(-h // side)
    row, column = _patch_places(grid, config.spatial_merge_size).T
    frame = np.repeat(np.arange(t), h * w)
    window = (frame * down + row // side) * across + column // side
    place = (row % side) * side + column % side
    position = window * side**2 + place
    index = np.zeros(t * down * across * side**2, np.int64)
    mask = np.zeros(len(index), np.bool_)
    index[position] = np.arange(len(position))
    mask[position] = True
    return Windows(index, mask.reshape(-1, side**2), position)


def max_windows(config: VisionConfig, max_patches: int, aspect_limit: int | None = None) -> int:
    """The most windows that any one-frame grid of at most `max_patches` patches needs.

    p windows along a side need at least (p - 1) * k + 1 merged units there, k units being a
    window's side. With `aspect_limit` r only grids that smart_resize can give count: long <= r *
    (short + 1) + 1 units, since it rounds each side by at most one unit (default limits of
    Qwen2.5-VL: 151 instead of 320).
    """
    k = _window_side(config)
    units = max_patches // config.spatial_merge_size**2
    most = 0
    for short in range(1, math.isqrt(units) + 1):
        long = units // short
        if aspect_limit is not None:
            long = min(long, aspect_limit * (short + 1) + 1)
        most = max(most, -(-short // k) * -(-long // k))
    return most


def _window_side(config: VisionConfig) -> int:
    """A window's side in merged units."""
    if config.window_size is None:
        raise ValueError(f"{config.model_type} has no attention windows")
    return config.window_size // config.spatial_merge_size // config.patch_size
