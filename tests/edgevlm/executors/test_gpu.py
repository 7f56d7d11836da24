"""The same arena, ring, streams and graphs on a real GPU: `pytest -m gpu`."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgevlm.config import Limits
from edgevlm.errors import ExecutorError
from edgevlm.memory_plan import MemoryPlan, Pool, place, placed_bytes

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[Any]:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("there is no NVIDIA driver here (libcuda.so.1)")
    if hasattr(library, "stub_used"):
        pytest.skip("the stand-in for the driver holds this process; run `pytest -m gpu`")
    from edgevlm.executors.cuda import Device

    device = Device()
    yield device
    device.close()


def plan() -> MemoryPlan:
    cache = place("kv_cache", [(f"cache.{i}", "float16", (100 * MIB,)) for i in range(12)])
    io = place("io", [("ids", "int64", (3,)), ("rows", "float16", (1024, 1024))])
    pools = (
        Pool("kv_cache", placed_bytes(cache), ""),
        Pool("io", placed_bytes(io), ""),
        Pool("activations", 64 * MIB, ""),
        Pool("staging", 8 * MIB, ""),
    )
    return MemoryPlan(Limits(64, 16, 1), pools, (*cache, *io))


@pytest.fixture
def arena(device: Any) -> Iterator[Any]:
    from edgevlm.executors.arena import Arena

    arena = Arena(device, plan())
    yield arena
    arena.close()


def free_bytes() -> int:
    from cuda.bindings import driver

    return int(driver.cuMemGetInfo()[1])


def test_pools_are_taken_and_given_back(device: Any) -> None:
    from edgevlm.executors.arena import Arena

    before = free_bytes()
    arena = Arena(device, plan())
    held = before - free_bytes()
    wanted = sum(p.bytes for p in plan().pools if p.name != "staging")
    if not device.facts.integrated:
        assert wanted <= held <= wanted + 64 * MIB
    assert [c.bytes for c in arena.chunks("kv_cache")] == [1000 * MIB, 1000 * MIB, 400 * MIB]
    arena.seal()
    with pytest.raises(ExecutorError, match="after start"):
        arena.allocate(100, "test")
    arena.close()
    assert abs(before - free_bytes()) <= 64 * MIB


def test_an_impossible_size_is_one_clear_error(device: Any) -> None:
    from edgevlm.executors.arena import Arena

    pools = (Pool("activations", 64 * MIB, ""), Pool("io", 1 << 45, ""))
    with pytest.raises(ExecutorError, match=r"io: the device refused .*OUT_OF_MEMORY|one piece"):
        Arena(device, MemoryPlan(Limits(64, 16, 1), pools, ()))


def test_rings_graphs_and_counters(device: Any, arena: Any) -> None:
    from edgevlm.executors.cuda import Event, Stream
    from edgevlm.executors.staging import Staging

    first, second, event = Stream(device, "first"), Stream(device, "second"), Event()
    pinned = arena.chunks("staging")[0]
    staging = Staging(pinned.address, pinned.bytes)
    staging.connect(first)
    staging.connect(second)
    rows, cache = arena.address("rows"), arena.address("cache.0")
    size = 20 * MIB
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    staging.write(first, cache, data)
    event.record(first)
    second.wait(event)
    out = np.empty(size, np.uint8)
    staging.read(second, cache, out)
    assert (out == data).all()
    graph = first.capture(lambda: first.on_device(cache, rows, MIB))
    for seed in range(3):
        piece = np.random.default_rng(seed).integers(0, 256, MIB, dtype=np.uint8)
        staging.write(first, rows, piece)
        first.launch(graph)
        out = np.empty(MIB, np.uint8)
        staging.read(first, cache, out)
        assert (out == piece).all()
    first.rows_on_device(cache, 4096, rows, 2048, 1024, 100)
    first.fill(rows, 0, MIB)
    out = np.empty(4096 * 100, np.uint8)
    staging.read(first, cache, out)
    wanted = piece[: 2048 * 100].reshape(100, 2048)[:, :1024]
    assert (out.reshape(100, 4096)[:, :1024] == wanted).all()
    assert device.copied.h2d == size + 3 * MIB and device.copied.d2h == size + 3 * MIB + 4096 * 100
    for thing in (graph, staging, event, first, second):
        thing.close()


def test_a_file_goes_to_the_device(device: Any, arena: Any, tmp_path: Any) -> None:
    from edgevlm.executors.cuda import Stream
    from edgevlm.executors.loading import load_to_device
    from edgevlm.executors.staging import Staging

    data = np.random.default_rng(1).integers(0, 256, 50 * MIB + 5, dtype=np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(data.tobytes())
    stream = Stream(device, "compute")
    pinned = arena.chunks("staging")[0]
    staging = Staging(pinned.address, pinned.bytes)
    staging.connect(stream)
    load_to_device(path, arena.address("cache.1"), data.nbytes, staging, stream)
    out = np.empty(data.nbytes, np.uint8)
    staging.read(stream, arena.address("cache.1"), out)
    assert (out == data).all()
    staging.close()
    stream.close()


def test_a_capture_that_fails_leaves_the_stream_usable(device: Any, arena: Any) -> None:
    from edgevlm.executors.cuda import Stream

    stream = Stream(device, "compute")
    rows = arena.address("rows")

    def synchronize() -> None:
        stream.on_device(rows + MIB, rows, 4096)
        stream.synchronize()

    with pytest.raises(ExecutorError, match="CAPTURE"):
        stream.capture(synchronize)
    stream.fill(rows, 0, MIB)
    stream.synchronize()
    stream.close()


def test_tensorrt_is_found_where_it_is_installed() -> None:
    pytest.importorskip("tensorrt", reason="TensorRT is not installed")
    from edgevlm.executors.tensorrt_api import load_api

    assert load_api("tensorrt", "classic").version >= (10, 3)
