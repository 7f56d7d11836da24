"""Where a builder's weights come from: by canonical name, as float32, in bands of rows.

Canonical names are those of the hub's Qwen2-VL files: `model.layers.N...`, `lm_head.weight`,
`visual.blocks.N...`. The sources are `Checkpoint` (files) and `RandomWeights` (none).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from builders.models import FAMILIES
from edgevlm.config import ModelConfig

# Random values are repeated beyond this many: a 7B then costs little more than its memory. Odd, so
# that the repeats begin at other columns and no two rows of a matrix are alike.
BLOCK = (1 << 22) - 3


class WeightSource(Protocol):
    """Tensors by canonical name. A tied head has no `lm_head.weight`."""

    def names(self) -> Collection[str]:
        """Canonical names of all the tensors that the family needs."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it."""
        ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Its values, read now and owned by the caller."""
        ...

    def rows(self, name: str, begin: int, end: int) -> NDArray[np.float32]:
        """Rows `begin` to `end` of its values, the rest not read."""
        ...


class RandomWeights:
    """The published dimensions with random values, made on demand: for benches and the plan."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self._shapes = FAMILIES[config.model_type].tensor_shapes(config)
        self._latest: tuple[str, NDArray[np.float32]] | None = None

    def names(self) -> Collection[str]:
        """Canonical names of all the tensors that the family needs."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self._shapes[name]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Norm weights are 1, the rest normal with deviation 0.02; always the same for a name."""
        return self.rows(name, 0, self._shapes[name][0])

    def rows(self, name: str, begin: int, end: int) -> NDArray[np.float32]:
        """Rows `begin` to `end` of it."""
        shape = (end - begin, *self._shapes[name][1:])
        if "norm" in name.split(".")[-2] and name.endswith(".weight") or ".ln_q.weight" in name:
            return np.ones(shape, np.float32)
        block = self._block(name)
        values = np.empty(math.prod(shape), np.float32)
        at, skip = 0, begin * math.prod(shape[1:]) % BLOCK
        while at < len(values):
            part = block[skip : skip + len(values) - at]
            values[at : at + len(part)] = part
            at, skip = at + len(part), 0
        return values.reshape(shape)

    def _block(self, name: str) -> NDArray[np.float32]:
        """What is repeated; the latest is kept, because a tensor is read in many bands."""
        if self._latest is None or self._latest[0] != name:
            # the name seeds its own stream, so that order and other tensors do not matter
            random = np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode())]))
            size = min(BLOCK, math.prod(self._shapes[name]))
            block = random.standard_normal(size, dtype=np.float32)
            block *= np.float32(0.02)
            self._latest = name, block
        return self._latest[1]
