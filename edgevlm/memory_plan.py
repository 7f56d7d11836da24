"""The ledger of every byte the runtime takes, and where each tensor lies in it.

Pure arithmetic: it knows sizes and names, no model, no device and no library.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from edgevlm.config import Limits

ALIGNMENT = 256  # bytes; what TensorRT asks of an address and more than any CPU kernel does

PoolName = Literal[
    "weights.llm",
    "weights.vision",
    "kv_cache",
    "activations",
    "io",
    "staging",
    "vision_cache",
    "runtime",
    "embedding_table",
]
Source = Literal["planned", "reported"]
DType = Literal["float32", "float16", "int64", "int32", "bool"]


@dataclass(frozen=True)
class Pool:
    """One allocation made at start. `reclaimable`: file-backed, so the kernel can take it back."""

    name: PoolName
    bytes: int
    formula: str
    source: Source = "planned"
    reclaimable: bool = False


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies: `offset` bytes into its pool."""

    name: str
    pool: PoolName
    offset: int
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return tensor_bytes(self.shape, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes from one index of the first axis to the next."""
        return tensor_bytes(self.shape[1:], self.dtype)


@dataclass(frozen=True)
class MemoryPlan:
    """Pools, the tensors in them, and what they were sized for."""

    limits: Limits
    pools: tuple[Pool, ...]
    placements: tuple[Placement, ...]
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        check_placements(self.pools, self.placements)

    @property
    def total_bytes(self) -> int:
        """What must be free at start: every pool that the kernel cannot take back."""
        return sum(p.bytes for p in self.pools if not p.reclaimable)

    @property
    def fits(self) -> bool | None:
        """Whether the total is within the budget; None where no budget was given."""
        return None if self.budget_bytes is None else self.total_bytes <= self.budget_bytes

    def pool(self, name: PoolName) -> Pool:
        """The pool of that name. Raises KeyError."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def placement(self, name: str) -> Placement:
        """The placement of that name. Raises KeyError."""
        for placement in self.placements:
            if placement.name == name:
                return placement
        raise KeyError(name)


def with_report(plan: MemoryPlan, reported: dict[PoolName, tuple[int, str]]) -> MemoryPlan:
    """The plan with pools that a build or a compiler measured: name -> (bytes, how)."""
    pools = tuple(
        dataclasses.replace(
            p, bytes=reported[p.name][0], formula=reported[p.name][1], source="reported"
        )
        if p.name in reported
        else p
        for p in plan.pools
    )
    return dataclasses.replace(plan, pools=pools)


def with_tensors(
    plan: MemoryPlan, pool: PoolName, tensors: list[tuple[str, DType, tuple[int, ...]]]
) -> MemoryPlan:
    """The plan with a pool that holds more tensors, after those that are there."""
    there = [(p.name, p.dtype, p.shape) for p in plan.placements if p.pool == pool]
    placed = place(pool, [*there, *tensors])
    pools = tuple(
        dataclasses.replace(p, bytes=placed_bytes(placed)) if p.name == pool else p
        for p in plan.pools
    )
    others = [p for p in plan.placements if p.pool != pool]
    return dataclasses.replace(plan, pools=pools, placements=(*others, *placed))


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def tensor_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes of a dense tensor."""
    count = 1
    for size in shape:
        count *= size
    return count * np.dtype(dtype).itemsize


def place(pool: PoolName, tensors: list[tuple[str, DType, tuple[int, ...]]]) -> list[Placement]:
    """Lay tensors one after the other into a pool, each at an aligned offset."""
    placements: list[Placement] = []
    offset = 0
    for name, dtype, shape in tensors:
        placements.append(Placement(name, pool, offset, dtype, shape))
        offset += aligned(placements[-1].nbytes)
    return placements


def placed_bytes(placements: list[Placement]) -> int:
    """Bytes that a pool needs to hold these placements."""
    return max((p.offset + aligned(p.nbytes) for p in placements), default=0)


def check_placements(pools: tuple[Pool, ...], placements: tuple[Placement, ...]) -> None:
    """Raise ValueError where placements share a name, overlap, or leave their pool."""
    sizes = {p.name: p.bytes for p in pools}
    if len(sizes) != len(pools):
        raise ValueError("two pools have the same name")
    if len({p.name for p in placements}) != len(placements):
        raise ValueError("two placements have the same name")
    ends: dict[PoolName, tuple[int, str]] = {}
    for p in sorted(placements, key=lambda p: p.offset):
        end, before = ends.get(p.pool, (0, ""))
        if p.offset < end:
            raise ValueError(f"{p.name} overlaps {before} in {p.pool}")
        if p.offset % ALIGNMENT:
            raise ValueError(f"{p.name} starts at byte {p.offset}, not a multiple of {ALIGNMENT}")
        if p.offset + p.nbytes > sizes.get(p.pool, 0):
            raise ValueError(f"{p.name} ends at byte {p.offset + p.nbytes}, beyond {p.pool}")
        ends[p.pool] = (p.offset + p.nbytes, p.name)
