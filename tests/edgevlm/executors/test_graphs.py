"""Streams, events, the pinned ring and graphs, on streams that run as late as they may."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgevlm.errors import ExecutorError
from tests.cuda_stub import D2D, D2H, H2D, Stub

pytestmark = pytest.mark.usefixtures("stub")
RING = 64 << 10


class Rig:
    """Two streams, an event, a ring and 1 MiB on the device."""

    def __init__(self) -> None:
        from edgevlm.executors.cuda import Device, Event, Stream
        from edgevlm.executors.staging import Staging

        self.device = Device()
        self.first, self.second = Stream(self.device, "first"), Stream(self.device, "second")
        self.event = Event()
        self.pinned = self.device.allocate_host(RING)
        self.staging = Staging(self.pinned, RING)
        for stream in (self.first, self.second):
            self.staging.connect(stream)
        self.address = self.device.allocate(1 << 20)

    def put(self, values: Any, offset: int = 0, stream: Any = None) -> None:
        data = np.asarray(values, np.int32)
        target = self.address + offset
        self.staging.write(stream or self.first, target, data.reshape(-1).view(np.uint8))

    def get(self, count: int, offset: int = 0, stream: Any = None) -> np.ndarray:
        out = np.empty(count * 4, np.uint8)
        self.staging.read(stream or self.first, self.address + offset, out)
        return out.view(np.int32)

    def close(self) -> None:
        self.device.free(self.address)
        self.staging.close()
        self.device.free_host(self.pinned)
        for thing in (self.event, self.first, self.second, self.device):
            thing.close()
            thing.close()


@pytest.fixture
def rig(stub: Stub) -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_a_replay_sees_new_inputs(stub: Stub, rig: Rig) -> None:
    rig.put([1, 2, 3])
    rig.first.synchronize()
    launches = stub.lib.stub_launches()
    graph = rig.first.capture(lambda: rig.first.on_device(rig.address + 512, rig.address, 12))
    rig.first.fill(rig.address + 512, 0, 12)
    assert rig.get(3, 512).tolist() == [0, 0, 0], "a capture runs nothing"
    for values in ([1, 2, 3], [7, 8, 9]):
        rig.put(values)
        rig.first.launch(graph)
        assert rig.get(3, 512).tolist() == values
    assert stub.lib.stub_launches() - launches == 2
    graph.close()
    graph.close()


def test_what_is_enqueued_after_a_launch_comes_after_it(rig: Rig) -> None:
    rig.put([5])
    graph = rig.first.capture(lambda: rig.first.on_device(rig.address + 512, rig.address, 4))
    rig.first.launch(graph)
    rig.put([6])
    graph.close()  # while its launch waits: the driver keeps what it needs
    assert rig.get(1, 512).tolist() == [5] and rig.get(1).tolist() == [6]


def test_a_capture_that_fails_ends_and_the_stream_goes_on(stub: Stub, rig: Rig) -> None:
    def synchronize() -> None:
        rig.first.on_device(rig.address + 512, rig.address, 4)
        rig.first.synchronize()

    def allocate() -> None:
        rig.device.allocate(100)

    def wait() -> None:
        rig.first.wait(rig.event)

    def crash() -> None:
        raise KeyError("ours")

    rig.event.record(rig.second)
    for enqueue, words in ((synchronize, "CAPTURE_UNSUPPORTED"), (wait, "CAPTURE_ISOLATION")):
        with pytest.raises(ExecutorError, match=words):
            rig.first.capture(enqueue)
    with pytest.raises(ExecutorError, match="CAPTURE_UNSUPPORTED"):
        rig.first.capture(allocate)
    with pytest.raises(KeyError):
        rig.first.capture(crash)
    rig.put([3])
    assert rig.get(1).tolist() == [3]


@pytest.mark.parametrize("step", ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInst"])
def test_each_step_of_a_capture_may_fail(stub: Stub, rig: Rig, step: str) -> None:
    stub.fail(step, 1)
    with pytest.raises(ExecutorError, match="CUDA_ERROR_UNKNOWN"):
        rig.first.capture(lambda: rig.first.on_device(rig.address + 512, rig.address, 4))
    rig.put([4])
    assert rig.get(1).tolist() == [4]


def test_streams_run_late_and_events_order_them(rig: Rig) -> None:
    rig.put([1], stream=rig.first)
    rig.first.synchronize()
    rig.put([2], stream=rig.first)
    assert rig.get(1, stream=rig.second).tolist() == [1], "without an event it sees the past"
    rig.put([3], stream=rig.first)
    rig.event.record(rig.first)
    rig.second.wait(rig.event)
    assert rig.get(1, stream=rig.second).tolist() == [3]


def test_an_event_that_was_never_recorded_holds_nobody(rig: Rig) -> None:
    rig.event.synchronize()
    rig.first.wait(rig.event)
    rig.first.synchronize()


def test_a_buffer_is_not_filled_before_its_copies_are_done(rig: Rig) -> None:
    size = rig.staging.piece
    values = np.arange(4 * size, dtype=np.uint8).reshape(4, size)
    values += np.arange(4, dtype=np.uint8)[:, None]
    for i, stream in enumerate((rig.first, rig.second, rig.first, rig.second)):
        rig.staging.write(stream, rig.address + i * size, values[i])
    rig.device.synchronize()
    out = np.empty(4 * size, np.uint8)
    rig.staging.read(rig.first, rig.address, out)
    assert (out.reshape(4, size) == values).all()


def test_small_writes_share_a_buffer(stub: Stub, rig: Rig) -> None:
    with stub.trace() as trace:
        for i in range(8):
            rig.put([i], 256 * i)
    assert trace.names() == ["cuMemcpyHtoDAsync"] * 8
    assert [rig.get(1, 256 * i)[0] for i in range(8)] == list(range(8))


def test_a_reserved_piece_is_sent_without_another_copy(rig: Rig) -> None:
    piece = rig.staging.reserve(12)
    piece.view(np.int32)[:] = 9
    assert rig.staging.holds(piece.ctypes.data)
    rig.staging.send(rig.first, rig.address, piece)
    assert rig.get(3).tolist() == [9, 9, 9]
    assert not rig.staging.holds(np.zeros(3).ctypes.data)


def test_the_counters_tell_what_was_copied(stub: Stub, rig: Rig) -> None:
    before = [stub.copied(way) for way in (H2D, D2H, D2D)]
    rig.put(np.arange(50_000))
    rig.first.on_device(rig.address + 400_000, rig.address, 200_000)
    rig.first.rows_on_device(rig.address + 700_000, 64, rig.address, 32, 16, 10)
    assert (rig.get(50_000, 400_000) == np.arange(50_000)).all()
    rows = rig.get(152, 700_000)
    assert all(
        rows[16 * i : 16 * i + 4].tolist() == list(range(8 * i, 8 * i + 4)) for i in range(9)
    )
    moved = [stub.copied(way) - b for way, b in zip((H2D, D2H, D2D), before, strict=True)]
    copied = rig.device.copied
    assert moved == [copied.h2d, copied.d2h, copied.d2d] == [200_000, 200_608, 200_160]
    assert stub.lib.stub_unpinned() == 0


def test_a_ring_that_is_too_small(rig: Rig) -> None:
    from edgevlm.executors.staging import Staging, split_staging

    with pytest.raises(ExecutorError, match="staging has 20,000 bytes and needs 32,768"):
        Staging(rig.pinned, 20_000)
    assert split_staging(100_000, 1000) == (98_976, 1024)
    assert split_staging(40_000, 10_000) == (40_000, 0)
