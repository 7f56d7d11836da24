"""Matrices that are read in bands of whole rows, so that a large one is never whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BAND_BYTES = 16 << 20  # of float32 in one band

Array = NDArray[np.float32]


class RowSource(Protocol):
    """What of a `WeightSource` is needed here."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def rows(self, name: str, begin: int, end: int) -> Array: ...


@dataclass(frozen=True)
class Rows:
    """A float32 matrix [N, K] that is read when it is sliced: `rows[begin:end]` is [n, K]."""

    shape: tuple[int, int]
    read: Callable[[int, int], Array]

    def __getitem__(self, rows: slice) -> Array:
        begin, end, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"rows are read one after the other, not in steps of {step}")
        return self.read(begin, max(begin, end))

    def bands(self, nbytes: int = BAND_BYTES) -> Iterator[tuple[int, Array]]:
        """(first row, rows) in bands of at most `nbytes`, or of one row."""
        size = max(1, nbytes // (4 * self.shape[1]))
        for begin in range(0, self.shape[0], size):
            yield begin, self.read(begin, min(begin + size, self.shape[0]))


def rows_of(source: RowSource, *names: str) -> Rows:
    """The matrices of those names, one above the other."""
    shapes = [source.shape(name) for name in names]
    if any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(f"{', '.join(names)} have shapes {shapes}, which make no matrix")
    starts = np.cumsum([0, *(shape[0] for shape in shapes)])

    def read(begin: int, end: int) -> Array:
        parts = [
            source.rows(name, max(0, begin - low), min(end, high) - low)
            for name, low, high in zip(
                names, starts[:-1].tolist(), starts[1:].tolist(), strict=True
            )
            if begin < high and end > low
        ]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, shapes[0][1]), np.float32)

    return Rows((int(starts[-1]), shapes[0][1]), read)


def mapped(rows: Rows, change: Callable[[Array], Array]) -> Rows:
    """The same matrix with every band changed as it is read."""
    return Rows(rows.shape, lambda begin, end: change(rows.read(begin, end)))


def as_rows(values: Array | Rows) -> Rows:
    """A matrix that is in memory already, as one that is read."""
    if isinstance(values, Rows):
        return values
    n, k = values.shape
    return Rows((n, k), lambda begin, end: values[begin:end])
