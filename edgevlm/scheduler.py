"""Who runs when: one thread owns the executor, and every request takes turns on it.

A turn is at most one piece of a request that is being taken in (a stage of the tower, a chunk of
prefill), then one decode step for all that are answering, in one batch. Requests are taken in one
after the other, in the order they came. Nobody waits by asking again and again.
"""

import logging
import threading
import time
from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import EdgeVLMError, ExecutorError, ShuttingDown
from edgevlm.request_queue import RequestQueue
from edgevlm.runner import ModelRunner, Piece, Slot
from edgevlm.sequence import Memory, RunningRequest, as_error
from edgevlm.stats import Counts, Latency, Observer, Stats

log = logging.getLogger(__name__)

Pieces = Generator[Piece, None, NDArray[np.float32]]
CLOSED = "this VLM is closed; open the bundle again"


class Scheduler:
    """Answers requests on one runner until it is closed. `submit` and what follows: any thread."""

    def __init__(self, runner: ModelRunner, *, max_queue: int, memory: Memory) -> None:
        """`memory` gives a finished answer's figures. The runner's executor is closed here."""
        self._runner, self._memory = runner, memory
        self._wake = threading.Condition()
        self._queue = RequestQueue(max_queue, len(runner.slots))
        self._refused = 0
        self._draining = False
        self._stop: EdgeVLMError | None = None  # what those that still run are told
        self._observers: list[Observer] = []
        # From here on the scheduler's thread alone.
        self._counts = Counts()
        self._ingesting: tuple[RunningRequest, Slot, Pieces] | None = None
        self._running: list[tuple[RunningRequest, Slot]] = []
        self._thread = threading.Thread(target=self._run, name="edgevlm scheduler", daemon=True)
        self._thread.start()

    def submit(self, sequence: RunningRequest) -> None:
        """Queue it. Raises BusyError, ShuttingDown, ExecutorError (closed)."""
        with self._wake:
            self.check_open()
            if self._draining:
                self._refused += 1
                raise ShuttingDown("this model is being shut down and takes no new requests")
            free = sum(not slot.busy for slot in self._runner.slots)
            try:
                self._queue.put(sequence, free)
            except EdgeVLMError:
                self._refused += 1
                raise
            self._wake.notify_all()

    def check_open(self) -> None:
        """Raise ExecutorError where nothing will be answered any more."""
        if self._stop is not None or not self._thread.is_alive():
            raise ExecutorError(CLOSED)

    def observe(self, observer: Observer) -> None:
        """Have `observer(name, seconds)` called, from the scheduler's thread, for each latency."""
        self._observers.append(observer)

    def stats(self) -> Stats:
        """What was done so far."""
        runner, cache = self._runner, self._runner.vision_cache
        with self._wake:
            queued, refused = len(self._queue), self._refused
        requests = dict(self._counts.requests)
        requests["refused"] = refused
        return Stats(
            slots=len(runner.slots),
            slots_busy=sum(slot.busy for slot in runner.slots),
            queued=queued,
            max_queue=self._queue.limit,
            requests=requests,
            vision_cache_hits=cache.hits,
            vision_cache_misses=cache.misses,
            allocations_after_start=runner.executor.allocations_after_start,
            pools=runner.pools_in_use(),
            **self._counts.sums(),  # type: ignore[arg-type]
        )

    def drain(self, grace: float) -> None:
        """Take nothing new; let what is there end for `grace` seconds, end the rest, close."""
        with self._wake:
            self._draining = True
            self._wake.wait_for(lambda: self._stop is not None or self._idle(), max(0.0, grace))
        self.close(ShuttingDown(f"the model was shut down; it gave its requests {grace:g} s"))

    def close(self, told: EdgeVLMError | None = None) -> None:
        """End everything with `told` and close the executor. Safe to call twice."""
        with self._wake:
            self._stop = self._stop or told or ExecutorError(CLOSED)
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _idle(self) -> bool:
        return not self._running and self._ingesting is None and not self._queue

    def _run(self) -> None:
        """The thread. It ends when it is told to, and never without telling everyone."""
        try:
            while True:
                with self._wake:
                    if self._idle():
                        self._wake.notify_all()  # whoever drains
                        self._wake.wait_for(lambda: self._stop is not None or not self._idle())
                    if self._stop is not None:
                        return
                self._turn()
        except BaseException as error:
            log.exception("the scheduler failed")
            with self._wake:
                words = f"the scheduler failed ({type(error).__name__}: {error}); {CLOSED}"
                self._stop = self._stop or ExecutorError(words)
        finally:
            self._end_all()
            self._runner.executor.close()

    def _turn(self) -> None:
        try:
            self._end_those_over()
            if self._ingesting is None:
                self._admit()
            if self._ingesting is not None:
                self._ingest_piece(*self._ingesting)
            if self._running:
                self._decode_step()
        except Exception as error:  # the executor, or a bug: nobody's state can be trusted
            log.warning("all requests end: %s", error, exc_info=not isinstance(error, EdgeVLMError))
            self._fail_all(error)

    def _end_those_over(self) -> None:
        """Whoever was cancelled or is past its deadline, wherever it is."""
        now = time.perf_counter()
        with self._wake:
            waiting = list(self._queue.drop_over(now))
        for sequence, error in waiting:
            self._tell(sequence, error)
        if self._ingesting is not None:
            sequence, slot, pieces = self._ingesting
            if (ended := sequence.over(now)) is not None:
                pieces.close()
                self._ingesting = None
                self._release(sequence, slot)
                self._tell(sequence, ended)
        for sequence, slot in self._running:
            if (ended := sequence.over(now)) is not None:
                self._release(sequence, slot)
                self._tell(sequence, ended)
        self._running = [pair for pair in self._running if pair[1].busy]

    def _admit(self) -> None:
        """The next in line gets the free slot that remembers most of its prompt."""
        free = [slot for slot in self._runner.slots if not slot.busy]
        if not free:
            return
        with self._wake:
            if not self._queue:
                return
            sequence = self._queue.pop()
            request = sequence.request
            slot = max(free, key=lambda s: (s.common_prefix(request.keys), -s.length))
            slot.busy = True
        sequence.admitted = time.perf_counter()
        waited = sequence.admitted - sequence.submitted
        sequence.timings["queue_ms"] = waited * 1e3
        self._observe("queue", waited)
        sequence.cached = self._runner.reusable(slot, request.prompt, request.keys)
        pieces = self._runner.ingest(
            slot, request.prompt, request.keys, request.pictures, request.digests, sequence.cached
        )
        self._ingesting = sequence, slot, pieces
        counts = self._counts
        counts.prompt_tokens += request.prompt_tokens
        counts.cached_tokens += sequence.cached
        counts.image_tokens += request.image_tokens
        counts.images += len(request.pictures)

    def _ingest_piece(self, sequence: RunningRequest, slot: Slot, pieces: Pieces) -> None:
        """One piece; after the last one the first token."""
        start = time.perf_counter()
        logits = None
        try:
            kind = next(pieces)
        except StopIteration as done:
            kind, logits = "prefill", done.value
        except ExecutorError:
            raise
        except Exception as error:  # its own pictures or numbers: the others go on
            log.exception("a request failed while it was taken in")
            self._ingesting = None
            self._end_with(sequence, slot, error)
            return
        seconds = time.perf_counter() - start
        sequence.timings[f"{kind}_ms"] += seconds * 1e3
        if kind == "vision":
            self._counts.vision_seconds += seconds
        else:
            self._counts.prefill_seconds += seconds
        if logits is not None:
            self._ingesting = None
            if self._sample(sequence, slot, logits):
                self._observe("first_token", sequence.timings["first_token_ms"] / 1e3)
                if slot.busy:
                    self._running.append((sequence, slot))

    def _decode_step(self) -> None:
        start = time.perf_counter()
        logits = self._runner.decode([(slot, sequence.token) for sequence, slot in self._running])
        self._counts.decode_seconds += time.perf_counter() - start
        self._counts.decode_steps += 1
        ended = False
        for sequence, slot in self._running:
            before = sequence.last
            if self._sample(sequence, slot, logits[slot.index]) and self._observers:
                self._observe("inter_token", sequence.last - before)
            ended = ended or not slot.busy
        if ended:
            self._running = [pair for pair in self._running if pair[1].busy]

    def _sample(self, sequence: RunningRequest, slot: Slot, logits: NDArray[np.float32]) -> bool:
        """One more token and its delta; False where that went wrong, for this request alone."""
        try:
            delta = sequence.sample(logits)
        except Exception as error:
            self._end_with(sequence, slot, error)
            return False
        self._counts.completion_tokens += 1
        if delta.finish_reason is None:
            sequence.mailbox.put(delta)
            return True
        self._release(sequence, slot)
        self._counts.requests[delta.finish_reason] += 1
        sequence.mailbox.put(sequence.finished(delta, self._memory()), last=True)
        return True

    def _end_with(self, sequence: RunningRequest, slot: Slot, error: Exception) -> None:
        """A request's own error; what lies in its cache may be what went wrong."""
        slot.length = 0
        self._release(sequence, slot)
        self._tell(sequence, as_error(error))

    def _fail_all(self, error: Exception) -> None:
        """An executor that failed ends all that is on it; the next requests try it again."""
        taken = [(sequence, slot) for sequence, slot in self._running]
        if self._ingesting is not None:
            sequence, slot, pieces = self._ingesting
            pieces.close()
            taken.append((sequence, slot))
        self._running, self._ingesting = [], None
        self._runner.forget()
        for sequence, slot in taken:
            self._release(sequence, slot)
            self._tell(sequence, as_error(error))

    def _end_all(self) -> None:
        """The thread ends: so does everything that it would have done."""
        assert self._stop is not None
        with self._wake:
            waiting = self._queue.clear()
        self._fail_all(self._stop)
        for sequence in waiting:
            self._tell(sequence, as_error(self._stop))
        with self._wake:
            self._wake.notify_all()

    def _release(self, sequence: RunningRequest, slot: Slot) -> None:
        slot.busy = False
        with self._wake:
            self._queue.served(time.perf_counter() - sequence.admitted)

    def _tell(self, sequence: RunningRequest, error: EdgeVLMError) -> None:
        outcome = {"Cancelled": "cancelled", "DeadlineExceeded": "deadline"}
        self._counts.requests[outcome.get(type(error).__name__, "error")] += 1
        sequence.mailbox.put(error, last=True)

    def _observe(self, name: Latency, seconds: float) -> None:
        for observer in self._observers:
            try:
                observer(name, seconds)
            except Exception:
                log.exception("an observer failed and is dropped")
                self._observers = [o for o in self._observers if o is not observer]
