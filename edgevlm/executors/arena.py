"""All the memory of one executor: taken once at start, then sealed.

Pools come from the plan, largest first, in chunks that a placement never straddles: some L4T
releases refuse one large allocation where several smaller ones fit. What TensorRT takes for itself
passes through here as well, so that one counter tells the whole truth.
"""

import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgevlm.errors import ExecutorError
from edgevlm.executors.cuda import Device
from edgevlm.memory_plan import ALIGNMENT, MemoryPlan, Placement, Pool, PoolName

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30
DEVICE_POOLS: tuple[PoolName, ...] = ("kv_cache", "activations", "io", "vision_cache")
HOST_POOLS: tuple[PoolName, ...] = ("staging",)


@dataclass(frozen=True)
class Chunk:
    """One allocation: the part of its pool that begins at `start`."""

    start: int
    bytes: int
    address: int = 0


@dataclass(frozen=True)
class _Block:
    owner: str
    bytes: int
    pinned: bool = False


class Arena:
    """Takes a plan's pools; after `seal` it refuses and counts. `fill` takes pools in our stead.

    `fill` names the pools that somebody else takes through `allocate`, such as TensorRT its
    weights: each is called when it is that pool's turn.
    """

    def __init__(
        self,
        device: Device,
        plan: MemoryPlan,
        fill: Mapping[PoolName, Callable[["Arena"], None]] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.refused = 0
        self._device = device
        self._sealed = self._closed = False
        self._lock = threading.RLock()  # TensorRT allocates from threads of its own
        self._blocks: dict[int, _Block] = {}
        self._chunks: dict[PoolName, list[Chunk]] = {}
        self._addresses: dict[str, int] = {}
        self._users: list[Callable[[], None]] = []
        fill = fill or {}
        try:
            for pool in (p for p in plan.pools if p.name in HOST_POOLS and p.bytes):
                self._take_host(pool)
            ours = [p for p in plan.pools if p.name in DEVICE_POOLS and p.bytes]
            theirs = [p for p in plan.pools if p.name in fill]
            for pool in sorted([*ours, *theirs], key=lambda p: -p.bytes):
                if pool.name in fill:
                    fill[pool.name](self)
                else:
                    self._take(pool, plan.placements, chunk_bytes)
        except BaseException as error:
            drop_locals(error)
            self.close()
            raise

    def chunks(self, pool: PoolName) -> Sequence[Chunk]:
        """Where a pool lies."""
        return self._chunks.get(pool, [])

    def address(self, placement: str) -> int:
        """Where a placement lies. Raises KeyError."""
        return self._addresses[placement]

    def allocate(self, nbytes: int, owner: str) -> int:
        """Device memory beside the plan's placements. Raises ExecutorError, always once sealed."""
        with self._lock:
            if self._sealed:
                self.refused += 1
                raise ExecutorError(
                    f"{owner} asked for {nbytes:,} bytes after start; memory is sealed then, so "
                    "this is a bug in edgevlm"
                )
            if self._closed:
                raise ExecutorError(f"{owner} asked for {nbytes:,} bytes of a closed arena")
            return self._block(self._device.allocate, nbytes, owner, f"{nbytes:,} bytes")

    def free(self, address: int) -> bool:
        """Give one allocation back; False where there is none at that address."""
        with self._lock:
            block = self._blocks.pop(address, None)
            if block is None:
                return False
            (self._device.free_host if block.pinned else self._device.free)(address)
            return True

    def before_close(self, let_go: Callable[[], None]) -> None:
        """Call `let_go` before memory is given back, the last one first: it still uses some."""
        self._users.append(let_go)

    def seal(self) -> None:
        """From now on nothing is taken."""
        with self._lock:
            self._sealed = True
        for owner, nbytes in self.taken().items():
            log.info("%s: %s bytes", owner, f"{nbytes:,}")

    def taken(self) -> dict[str, int]:
        """Bytes by pool and other owner, in the order they were first taken."""
        totals: dict[str, int] = {}
        with self._lock:
            for block in self._blocks.values():
                totals[block.owner] = totals.get(block.owner, 0) + block.bytes
        return totals

    def close(self) -> None:
        """Give everything back, last taken first; safe to call twice."""
        with self._lock:
            self._closed = True
            while self._users:
                self._users.pop()()
            for address in reversed(list(self._blocks)):
                self.free(address)

    def _take(self, pool: Pool, placements: Sequence[Placement], limit: int) -> None:
        inside = [p for p in placements if p.pool == pool.name]
        if not self._device.facts.integrated and not inside:
            limit = max(limit, pool.bytes)  # only a board's allocator is afraid of large pieces
        parts = chunk_pool(pool, inside, limit)
        taken: list[Chunk] = []
        for number, part in enumerate(parts, 1):
            what = f"chunk {number} of {len(parts)}, {part.bytes:,} of {pool.bytes:,} bytes"
            address = self._block(self._device.allocate, part.bytes, pool.name, what)
            taken.append(Chunk(part.start, part.bytes, address))
        self._chunks[pool.name] = taken
        for placement in inside:
            home = max((c for c in taken if c.start <= placement.offset), key=lambda c: c.start)
            self._addresses[placement.name] = home.address + placement.offset - home.start

    def _take_host(self, pool: Pool) -> None:
        what = f"{pool.bytes:,} pinned bytes"
        address = self._block(self._device.allocate_host, pool.bytes, pool.name, what, pinned=True)
        self._chunks[pool.name] = [Chunk(0, pool.bytes, address)]

    def _block(
        self,
        take: Callable[[int], int],
        nbytes: int,
        owner: str,
        what: str,
        pinned: bool = False,
    ) -> int:
        try:
            address = take(nbytes)
        except ExecutorError as error:
            before = sum(self.taken().values())
            raise ExecutorError(
                f"{owner}: the device refused {what} ({error}) after {before:,} bytes; free memory "
                "or build the bundle with smaller limits"
            ) from error
        self._blocks[address] = _Block(owner, nbytes, pinned)
        if address % ALIGNMENT:  # never seen; TensorRT would fail in a way nobody understands
            raise ExecutorError(f"{owner}: address {address:#x} is not a multiple of {ALIGNMENT}")
        return address


def chunk_pool(pool: Pool, placements: Sequence[Placement], limit: int) -> list[Chunk]:
    """Cut a pool between placements into pieces of at most `limit` bytes. Raises ExecutorError.

    A pool without placements is one piece: whoever uses it wants one address.
    """
    cuts = [0]
    end = 0
    for placement in sorted(placements, key=lambda p: p.offset):
        end = placement.offset + placement.nbytes
        if end - cuts[-1] > limit:
            cuts.append(placement.offset)
        if end - cuts[-1] > limit:
            raise _too_large(placement.name, placement.nbytes, limit)
    if pool.bytes - cuts[-1] > limit:  # the pool is larger than what lies in it
        if not placements:
            raise _too_large(pool.name, pool.bytes, limit)
        cuts.append(-(-end // ALIGNMENT) * ALIGNMENT)
    ends = [*cuts[1:], pool.bytes]
    return [Chunk(start, end - start) for start, end in zip(cuts, ends, strict=True)]


def drop_locals(error: BaseException | None) -> None:
    """Forget what the frames of a failed call hold: it may use memory that is given back now."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _too_large(name: str, nbytes: int, limit: int) -> ExecutorError:
    return ExecutorError(
        f"{name} needs {nbytes:,} bytes in one piece and this runtime takes at most {limit:,} at "
        "once; build with a smaller --max-seq-len, --max-pixels or --max-prefill-chunk"
    )
