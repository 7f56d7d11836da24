"""Where a builder's weights come from: by canonical name, one float32 tensor at a time.

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


class RandomWeights:
    """The published dimensions with random values, made on demand: for benches and the plan."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self._shapes = FAMILIES[config.model_type].tensor_shapes(config)

    def names(self) -> Collection[str]:
        """Canonical names of all the tensors that the family needs."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self._shapes[name]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Norm weights are 1, the rest normal with deviation 0.02; always the same for a name."""
        shape = self._shapes[name]
        if "norm" in name.split(".")[-2] and name.endswith(".weight") or ".ln_q.weight" in name:
            return np.ones(shape, np.float32)
        # the name seeds its own stream, so that order and other tensors do not matter
        random = np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode())]))
        values = np.empty(math.prod(shape), np.float32)
        block = random.standard_normal(min(BLOCK, len(values)), dtype=np.float32)
        block *= np.float32(0.02)
        for at in range(0, len(values), BLOCK):
            values[at : at + BLOCK] = block[: len(values) - at]
        return values.reshape(shape)
