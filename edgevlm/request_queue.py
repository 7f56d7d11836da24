"""The requests that wait for a slot: first come, first served, and only so many.

Not thread-safe: the scheduler's lock is held around every call.
"""

import math
from collections import deque
from collections.abc import Iterator

from edgevlm.errors import BusyError, EdgeVLMError
from edgevlm.sequence import RunningRequest

LONGEST_RETRY = 600.0  # seconds


class RequestQueue:
    """At most `limit` sequences beyond those that have a free slot to go to."""

    def __init__(self, limit: int, slots: int) -> None:
        self.limit, self._slots = limit, slots
        self._waiting: deque[RunningRequest] = deque()
        self._seconds: float | None = None  # that a request held its slot, averaged

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, sequence: RunningRequest, free_slots: int) -> None:
        """Append. Raises BusyError where as many as may wait are waiting."""
        if len(self._waiting) - free_slots >= self.limit:
            retry = self.retry_after()
            when = "" if retry is None else f" in about {retry:.0f} s"
            raise BusyError(
                f"{self._slots} requests are being answered and {len(self._waiting)} wait; no more "
                f"than {self.limit} may; try again{when}",
                retry,
            )
        self._waiting.append(sequence)

    def pop(self) -> RunningRequest:
        """The one that has waited longest."""
        return self._waiting.popleft()

    def drop_over(self, now: float) -> Iterator[tuple[RunningRequest, EdgeVLMError]]:
        """Take out those that were cancelled or whose deadline has passed, wherever they stand."""
        ended = [(waiting, waiting.over(now)) for waiting in self._waiting]
        for waiting, error in ended:
            if error is not None:
                self._waiting.remove(waiting)
                yield waiting, error

    def clear(self) -> list[RunningRequest]:
        """Take out all."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def served(self, seconds: float) -> None:
        """A request gave its slot back after so long."""
        self._seconds = seconds if self._seconds is None else 0.8 * self._seconds + 0.2 * seconds

    def retry_after(self) -> float | None:
        """Whole seconds until a request that came now might have its turn; None: not known yet."""
        if self._seconds is None:
            return None
        turns = (len(self._waiting) + 1) / self._slots
        return float(min(max(1, math.ceil(self._seconds * turns)), LONGEST_RETRY))
