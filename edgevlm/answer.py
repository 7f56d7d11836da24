"""An answer as its caller sees it: deltas one by one, waited for or asked for, and a way to cancel.

The scheduler's side of it is `Mailbox`. Neither knows the model; nothing here ever blocks the
scheduler, and an answer that nobody holds any more takes its request back.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

from edgevlm.errors import EdgeVLMError
from edgevlm.generation import Delta, Generation
from edgevlm.request import Request

log = logging.getLogger(__name__)


class Mailbox:
    """What the scheduler puts in and the caller takes out; `cancelled` is the way back.

    It holds as many deltas as an answer can have tokens, however slow its reader is.
    """

    __slots__ = ("cancelled", "ended", "items", "notify")

    def __init__(self, notify: Callable[[], object] | None = None) -> None:
        self.items: queue.SimpleQueue[Delta | EdgeVLMError] = queue.SimpleQueue()
        self.cancelled = False  # one flag, no lock: it is set from a finalizer too
        self.ended = threading.Event()
        self.notify = notify

    def put(self, item: Delta | EdgeVLMError, last: bool = False) -> None:
        """A delta or the error that ends it. `last`: nothing will follow."""
        self.items.put(item)
        if last:
            self.ended.set()
        if self.notify is not None:
            try:
                self.notify()
            except Exception:  # its owner is gone or wrong: no reason to stop the others
                log.exception("an answer's notify failed; its request is cancelled")
                self.cancelled, self.notify = True, None


class Answer:
    """An iterator of deltas. One thread reads it; any thread may cancel it.

    The error that ended a request is raised where its next delta would have come: Cancelled,
    DeadlineExceeded, ShuttingDown, ExecutorError.
    """

    def __init__(self, request: Request, mailbox: Mailbox) -> None:
        self.request = request
        self._mailbox = mailbox
        self._error: EdgeVLMError | None = None
        self._over = False

    def __iter__(self) -> "Answer":
        return self

    def __next__(self) -> Delta:
        """The next delta; waits for it. The last one has the whole `generation`."""
        self._raise_error()
        if self._over:
            raise StopIteration
        return self._taken(self._mailbox.items.get())

    def poll(self) -> Delta | None:
        """The next delta where there is one now. Raises what `next` would, but no StopIteration."""
        self._raise_error()
        if self._over:
            return None
        try:
            item = self._mailbox.items.get_nowait()
        except queue.Empty:
            return None
        return self._taken(item)

    def result(self) -> Generation:
        """Wait for the end, without waking for every token; the whole answer."""
        try:
            self._mailbox.ended.wait()
        except BaseException:  # Ctrl-C
            self.cancel()
            raise
        generation = None
        for delta in self:
            generation = delta.generation
        assert generation is not None, "an answer ends with its generation"
        return generation

    def cancel(self) -> None:
        """Take the request back, from any thread; idempotent, and nothing once it has ended."""
        self._mailbox.cancelled = True

    def close(self) -> None:
        """Cancel and read no more, as closing a generator does."""
        self.cancel()
        self._over = True

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # never finished being made
            self._mailbox.cancelled = True

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _taken(self, item: Delta | EdgeVLMError) -> Delta:
        if isinstance(item, EdgeVLMError):
            self._error = item
            raise item
        self._over = item.generation is not None
        return item
