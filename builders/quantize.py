"""Symmetric INT4, weight-only: groups along K, fp16 scales found by error search.

Knows nothing of graphs or checkpoints: a [N, K] matrix goes in, codes and scales come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from builders.rows import Rows
from edgevlm.errors import UnsupportedCheckpoint

FP16_MAX = 65504.0
SCALE_MAX = 8188.0  # 8 steps of it still fit in fp16
GROUP_SIZES = (128, 64, 32)
CANDIDATES = np.linspace(6, 10, 13, dtype=np.float32)  # steps per absmax; 7 is plain rounding
REFINEMENTS = 2
BAND = 1 << 18  # weights worked on at a time: their 1 MiB of float32 stays in the cache

Array = NDArray[np.float32]


@dataclass(frozen=True)
class QuantizedWeight:
    """`codes` [N, K/2] hold q + 8, two a byte, low nibble first; `scales` [N, K/group_size]."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight it stands for."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> NDArray[np.float32]:
        """The weight that the codes stand for, [N, K]."""
        n, k = self.shape
        weight = np.empty((n, k), np.float32)
        weight[:, 0::2] = self.codes & 15
        weight[:, 1::2] = self.codes >> 4
        weight -= 8
        groups = weight.reshape(n, k // self.group_size, self.group_size)
        groups *= self.scales.astype(np.float32)[:, :, None]
        return weight

    @staticmethod
    def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """One weight with the rows of all `parts` (same K, same group size), in order."""
        shapes = {(part.shape[1], part.group_size) for part in parts}
        if len(shapes) != 1:
            raise ValueError(f"cannot join rows of different (K, group_size): {sorted(shapes)}")
        return QuantizedWeight(
            np.concatenate([part.codes for part in parts]),
            np.concatenate([part.scales for part in parts]),
            parts[0].group_size,
        )


def choose_group_size(k: int, wanted: int) -> int | None:
    """The largest of `wanted`, 64 and 32 that divides K; None: the weight stays 16-bit."""
    sizes = (wanted, *(size for size in GROUP_SIZES if size < wanted))
    return next((size for size in sizes if k % size == 0), None)


def kept_16bit_reason(k: int, wanted: int) -> str:
    """Why `choose_group_size` gave None."""
    sizes = [str(size) for size in (wanted, *(s for s in GROUP_SIZES if s < wanted))]
    return f"input size {k} is not a multiple of {' or '.join(sizes)}"


def check_fp16_range(weight: NDArray[np.float32], name: str) -> None:
    """Refuses a weight that fp16 cannot hold."""
    largest = max(float(weight.max(initial=0.0)), -float(weight.min(initial=0.0)))
    if not largest <= FP16_MAX:
        raise UnsupportedCheckpoint(
            f"{name!r} has a value of magnitude {largest:g}, and fp16 ends at {FP16_MAX:g}; "
            "build with --weights fp32 or use another checkpoint"
        )


def checked_fp16(weight: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    """The weight itself. Raises UnsupportedCheckpoint where fp16 cannot hold it."""
    check_fp16_range(weight, name)
    return weight


def quantize(
    weight: NDArray[np.float32] | Rows, group_size: int, name: str = "weight"
) -> QuantizedWeight:
    """Codes and scales of a [N, K] weight; no group is worse than with the scale absmax / 7.

    `name` is for messages. Works in bands of whole rows: beyond its result it takes a few MiB.
    """
    n, k = weight.shape
    if k % group_size or group_size % 2:
        raise ValueError(f"group size {group_size} is odd or does not divide K = {k}")
    codes = np.empty((n, k // 2), np.uint8)
    scales = np.empty((n, k // group_size), np.float16)
    rows = max(1, BAND // k)
    for at in range(0, n, rows):
        band = np.ascontiguousarray(weight[at : at + rows], np.float32)
        check_fp16_range(band, name)
        q, scale = _quantize_groups(band.reshape(-1, group_size))
        q = q.reshape(band.shape)
        codes[at : at + rows] = q[:, 1::2] << 4 | q[:, 0::2]
        scales[at : at + rows] = scale.reshape(len(band), -1)
    return QuantizedWeight(codes, scales, group_size)


def _quantize_groups(w: Array) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Codes (q + 8) [M, g] and scales [M] of groups w [M, g]."""
    absmax = np.maximum(w.max(axis=1), -w.min(axis=1))
    safe: Array = np.where(absmax > 0, absmax, np.float32(1))
    # Each group in units of its own absmax: a candidate is then one number for all groups.
    x: Array = w / safe[:, None]
    steps = _refine(x, _search(x))
    plain, found = _fp16_scale(absmax / 7), _fp16_scale(absmax / steps)
    # Both are compared as they will be stored; the search does not see fp16's rounding.
    scale = np.where(_error(w, found) < _error(w, plain), found, plain)
    y = _codes(w, _inverse(scale))
    y += 8
    return y.astype(np.uint8), scale


def _search(x: Array) -> Array:
    """For each group the steps per absmax, 1 / scale, of least squared error [M]."""
    best = np.full(len(x), np.inf, np.float32)
    steps = np.full(len(x), 7, np.float32)
    y, q = np.empty_like(x), np.empty_like(x)
    for candidate in CANDIDATES:
        np.multiply(x, candidate, out=y)
        np.rint(y, out=q)
        if candidate >= 7.5:
            np.clip(q, -8, 7, out=q)
        q -= y
        error = np.einsum("mg,mg->m", q, q)
        error /= candidate * candidate
        better = error < best
        best[better] = error[better]
        steps[better] = candidate
    return steps


def _refine(x: Array, steps: Array) -> Array:
    """The least-squares scale for the codes that `steps` give, REFINEMENTS times."""
    for _ in range(REFINEMENTS):
        q = _codes(x, steps)
        dot, square = np.einsum("mg,mg->m", x, q), np.einsum("mg,mg->m", q, q)
        # a group of zeros has no codes to fit: it keeps its steps
        np.divide(square, dot, out=steps, where=dot > 0)
    return steps


def _codes(w: Array, inverse: Array) -> Array:
    """The nearest codes, -8 ... 7 as float32 [M, g], for 1 / scale [M]."""
    q = w * inverse[:, None]
    np.rint(q, out=q)
    return np.clip(q, -8, 7, out=q)


def _error(w: Array, scale: NDArray[np.float16]) -> Array:
    """Squared error of each group [M] with the scale as stored."""
    q = _codes(w, _inverse(scale))
    q *= scale.astype(np.float32)[:, None]
    q -= w
    error: Array = np.einsum("mg,mg->m", q, q)
    return error


def _fp16_scale(scale: Array) -> NDArray[np.float16]:
    """Rounded to fp16. Below 6e-8 it becomes 0 and the group's codes too: it rounds to zeros."""
    return np.minimum(scale, SCALE_MAX).astype(np.float16)


def _inverse(scale: NDArray[np.float16]) -> Array:
    """1 / scale in float32, 0 for a scale of 0."""
    wide = scale.astype(np.float32)
    inverse = np.zeros_like(wide)
    np.divide(1, wide, out=inverse, where=wide > 0)
    return inverse
