"""The arena to the byte, on the stand-in for the CUDA driver; and every call that can fail."""

from collections.abc import Callable
from typing import Any

import pytest

from edgevlm.config import Limits
from edgevlm.errors import ExecutorError
from edgevlm.memory_plan import MemoryPlan, Placement, Pool, place, placed_bytes
from tests.cuda_stub import OUT_OF_MEMORY, Stub

pytestmark = pytest.mark.usefixtures("stub")
LIMITS = Limits(64, 1, 1, 16)


def plan_of(*sizes: tuple[str, int], placements: tuple[Placement, ...] = ()) -> MemoryPlan:
    pools = tuple(Pool(name, nbytes, "") for name, nbytes in sizes)  # type: ignore[arg-type]
    return MemoryPlan(LIMITS, pools, placements)


def small_plan() -> MemoryPlan:
    cache = place("kv_cache", [(f"cache.{i}", "float16", (100, 7)) for i in range(5)])
    io = place("io", [("ids", "int64", (3,)), ("rows", "float16", (9, 33))])
    sizes = [("kv_cache", placed_bytes(cache)), ("io", placed_bytes(io)), ("activations", 5000)]
    return plan_of(("staging", 65536), *sizes, placements=(*cache, *io))


@pytest.fixture
def device() -> Any:
    from edgevlm.executors.cuda import Device

    device = Device()
    yield device
    device.close()


def arena_of(device: Any, plan: MemoryPlan, **settings: Any) -> Any:
    from edgevlm.executors.arena import Arena

    return Arena(device, plan, **settings)


def test_it_takes_exactly_what_the_plan_says(stub: Stub, device: Any) -> None:
    plan = small_plan()
    arena = arena_of(device, plan)
    assert stub.used == stub.peak == plan.total_bytes
    assert arena.taken() == {pool.name: pool.bytes for pool in plan.pools}
    arena.close()
    assert stub.used == 0


def test_the_largest_pool_is_taken_first_and_given_back_last(stub: Stub, device: Any) -> None:
    with stub.trace() as trace:
        arena_of(device, small_plan()).close()
    sizes = [int(line.split()[1]) for line in trace.lines if line.startswith("cuMemAlloc ")]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 3
    assert trace.names()[-2:] == ["cuMemFree", "cuMemFreeHost"]


def test_placements_lie_where_the_plan_puts_them(device: Any) -> None:
    plan = small_plan()
    arena = arena_of(device, plan)
    base = {name: arena.chunks(name)[0].address for name in ("kv_cache", "io")}
    for placement in plan.placements:
        address = arena.address(placement.name)
        assert address == base[placement.pool] + placement.offset and address % 256 == 0
    arena.close()


def test_a_placement_never_straddles_a_chunk(stub: Stub, device: Any) -> None:
    cache = place("kv_cache", [(f"cache.{i}", "float16", (1000,)) for i in range(10)])
    plan = plan_of(("kv_cache", placed_bytes(cache)), placements=tuple(cache))
    arena = arena_of(device, plan, chunk_bytes=5000)
    chunks = arena.chunks("kv_cache")
    assert len(chunks) == 5 and sum(c.bytes for c in chunks) == plan.pools[0].bytes == stub.used
    for placement in cache:
        start = arena.address(placement.name)
        end = start + placement.nbytes
        assert any(c.address <= start and end <= c.address + c.bytes for c in chunks)
    arena.close()


def test_chunks_are_at_most_one_gibibyte(stub: Stub, device: Any) -> None:
    cache = place("kv_cache", [(f"cache.{i}", "float16", (200 << 20,)) for i in range(6)])
    plan = plan_of(("kv_cache", placed_bytes(cache)), placements=tuple(cache))
    with stub.trace() as trace:
        arena_of(device, plan).close()
    sizes = [int(line.split()[1]) for line in trace.lines if line.startswith("cuMemAlloc ")]
    assert sizes == [800 << 20] * 3


def test_a_board_refuses_one_piece_that_is_too_large(stub: Stub, device: Any) -> None:
    with pytest.raises(ExecutorError, match=r"activations needs 1,200 bytes in one piece"):
        arena_of(device, plan_of(("activations", 1200)), chunk_bytes=1024)
    cache = tuple(place("kv_cache", [("cache.0", "float16", (600,))]))
    with pytest.raises(ExecutorError, match=r"cache\.0 needs 1,200 bytes in one piece"):
        arena_of(device, plan_of(("kv_cache", 1280), placements=cache), chunk_bytes=1024)


def test_after_the_seal_it_refuses_and_counts(stub: Stub, device: Any) -> None:
    arena = arena_of(device, small_plan())
    extra = arena.allocate(100, "TensorRT")
    arena.seal()
    before = stub.used
    for count in (1, 2):
        with pytest.raises(ExecutorError, match=r"TensorRT asked for 100 bytes after start"):
            arena.allocate(100, "TensorRT")
        assert (arena.refused, stub.used) == (count, before)
    assert arena.free(extra) and not arena.free(extra) and not arena.free(12345)
    assert stub.used == before - 100
    arena.close()
    arena.close()
    with pytest.raises(ExecutorError):
        arena.allocate(100, "TensorRT")


def test_others_fill_a_pool_when_it_is_its_turn(stub: Stub, device: Any) -> None:
    plan = plan_of(("weights.llm", 4000), ("kv_cache", 5000), ("activations", 3000))
    with stub.trace() as trace:
        fill = {"weights.llm": lambda arena: arena.allocate(3999, "weights.llm")}
        arena = arena_of(device, plan, fill=fill)
    sizes = [int(line.split()[1]) for line in trace.lines if line.startswith("cuMemAlloc ")]
    assert sizes == [5000, 3999, 3000]
    arena.close()


def test_a_refused_pool_is_named_and_what_came_before_is_given_back(
    stub: Stub, device: Any
) -> None:
    plan = plan_of(("kv_cache", 5000), ("activations", 4000), ("io", 3000))
    stub.budget(9500)
    with pytest.raises(ExecutorError) as caught:
        arena_of(device, plan)
    assert "io: the device refused chunk 1 of 1, 3,000 of 3,000 bytes" in str(caught.value)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value)
    assert stub.used == 0 and stub.peak == 9000


def test_every_allocation_that_fails_leaves_nothing(stub: Stub, device: Any) -> None:
    names = ("kv_cache", "activations", "io")  # by size
    for index in range(4):
        stub.fail("cuMemAlloc" if index else "cuMemHostAlloc", max(index, 1), OUT_OF_MEMORY)
        pool = names[index - 1] if index else "staging"
        with pytest.raises(ExecutorError, match=f"^{pool}: the device refused"):
            arena_of(device, small_plan())
        assert stub.used == 0


def exercise() -> None:
    """All that the arena, the ring and a stream do, from the first call of the driver on."""
    import numpy as np

    from edgevlm.executors.arena import Arena
    from edgevlm.executors.cuda import Device, Event, Stream
    from edgevlm.executors.staging import Staging

    closers: list[Callable[[], None]] = []
    try:
        device = Device()
        closers.append(device.close)
        arena = Arena(device, small_plan())
        closers.append(arena.close)
        stream = Stream(device, "compute")
        closers.append(stream.close)
        event = Event()
        closers.append(event.close)
        chunk = arena.chunks("staging")[0]
        staging = Staging(chunk.address, chunk.bytes)
        closers.append(staging.close)
        staging.connect(stream)
        rows = arena.address("rows")
        stream.fill(rows, 0, 594)
        staging.write(stream, rows, np.arange(297, dtype=np.uint16).view(np.uint8))
        graph = stream.capture(lambda: stream.on_device(arena.address("cache.0"), rows, 594))
        closers.append(graph.close)
        stream.launch(graph)
        event.record(stream)
        stream.wait(event)
        stream.rows_on_device(arena.address("cache.1"), 64, rows, 66, 32, 9)
        out = np.empty(594, np.uint8)
        staging.read(stream, arena.address("cache.0"), out)
        assert (out.view(np.uint16) == np.arange(297)).all()
        event.synchronize()
        device.synchronize()
    finally:
        for close in reversed(closers):
            close()


def test_every_call_that_fails_is_one_clear_error_and_leaves_nothing(stub: Stub) -> None:
    before = stub.calls
    exercise()
    count = stub.calls - before
    assert count > 40
    for index in range(1, count + 1):
        stub.fail("", index)
        try:
            exercise()
        except ExecutorError as error:
            assert "CUDA_ERROR_UNKNOWN" in str(error), str(error)
        stub.fail("", 0)
        assert stub.leaks() == {}, f"call {index}"
    exercise()


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgevlm.executors import cuda

    def no_driver(_: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1\nmore")

    monkeypatch.setattr(cuda.driver, "cuInit", no_driver)
    with pytest.raises(ExecutorError, match=r"no usable CUDA driver here \(Failed to dlopen"):
        cuda.Device()


def test_facts(device: Any) -> None:
    facts = device.facts
    assert facts.compute_capability == (8, 7) and facts.integrated and facts.name == "Stub"
    assert facts.total_bytes == 8 << 30


def test_another_thread_enters_the_context(device: Any) -> None:
    import threading

    failures: list[BaseException] = []

    def work() -> None:
        try:
            with pytest.raises(ExecutorError, match="CUDA_ERROR_INVALID_CONTEXT"):
                device.allocate(10)
            device.use()
            device.free(device.allocate(10))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
