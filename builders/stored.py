"""Where a family's tensors lie in its files, for families that store them in another way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Stored:
    """A canonical tensor's place: `rows` of the tensor that the files call `name` (None: all).

    `name` and `shape` are the stored tensor's; several canonical tensors may lie in one.
    """

    name: str
    shape: tuple[int, ...]
    rows: NDArray[np.int64] | None = field(default=None, compare=False)

    def take(self, values: NDArray[Any]) -> NDArray[Any]:
        """The canonical tensor out of the stored one."""
        return values if self.rows is None else values[self.rows]
