"""Answers of the scheduler's thread, read on the event loop: no thread waits, one wake-up for many.

Also the watch over the connection: when the client is gone, what was asked is taken back.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from starlette.types import Receive

from edgevlm.generation import Delta
from edgevlm.server.engine import Answering
from edgevlm.server.intake import ClientGone

T = TypeVar("T")


class Bell:
    """Rung from any thread, heard on the loop; ringing again before it was heard costs nothing."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard = asyncio.Event()
        self._ringing = False

    def ring(self) -> None:
        """Never blocks and never raises: the scheduler calls it."""
        if not self._ringing:
            self._ringing = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._ringing = False
        self._heard.set()

    def clear(self) -> None:
        """Before looking; what rings from now on is heard by `wait`."""
        self._heard.clear()

    async def wait(self, timeout: float | None) -> bool:
        """False where nothing rang in time."""
        late = False

        def give_up() -> None:
            nonlocal late
            late = True
            self._heard.set()

        timer = None if timeout is None else self._loop.call_later(timeout, give_up)
        try:
            await self._heard.wait()
        finally:
            if timer is not None:
                timer.cancel()
        return not late


async def deltas(
    answers: Sequence[Answering],
    bell: Bell,
    first: float | None = None,
    later: float | None = None,
) -> AsyncIterator[tuple[int, list[Delta]]]:
    """(which answer, all that is new of it) until each has ended.

    (-1, []) where nothing came for `first` seconds, and after that for `later` seconds.
    Raises the first error that ends one of them.
    """
    left, tick = dict(enumerate(answers)), first
    while left:
        bell.clear()
        quiet = True
        for i, answer in list(left.items()):
            news = []
            while (delta := answer.poll()) is not None:
                news.append(delta)
                if delta.generation is not None:
                    del left[i]
                    break
            if news:
                quiet, tick = False, later
                yield i, news
        if quiet and left and not await bell.wait(tick):
            tick = later
            yield -1, []


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; ClientGone as soon as the client has closed the connection."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
