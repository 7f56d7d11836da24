"""Bodies come in: counted while they are read, refused at a limit, and all of them within one sum.

Knows ASGI's `receive`; knows nothing about what a body says.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request

from edgevlm.server.errors import ApiError, busy

DRAIN_SECONDS = 5.0


class ClientGone(Exception):
    """Whoever asked has closed the connection; nobody reads an answer."""


class Intake:
    """How many requests may be inside, and how many bytes of bodies they may hold together."""

    def __init__(self, max_body: int, budget: int, max_requests: int, timeout: float) -> None:
        self.max_body, self.budget, self.max_requests = max_body, budget, max_requests
        self._timeout = timeout
        self.held = 0
        self.requests = 0

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """A request is inside while the block runs. Raises ApiError 429."""
        if self.requests >= self.max_requests:
            raise busy(
                f"{self.requests} requests are being read, waiting or answered; no more than "
                f"{self.max_requests} may; try again"
            )
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[tuple[bytes, "Held"]]:
        """The body, and what it holds of the sum until the block ends.

        Raises ApiError 408, 413, 415, 429, and ClientGone.
        """
        _check_type(request)
        held = Held(self)
        try:
            yield await self._read(request, held), held
        finally:
            held.give_back(held.bytes)

    async def _read(self, request: Request, held: "Held") -> bytes:
        announced = request.headers.get("content-length", "")
        length = int(announced) if announced.isascii() and announced.isdigit() else 0
        if length > self.max_body:
            await _discard(request.receive, self.max_body)
            raise self._too_large(length)
        try:
            return await asyncio.wait_for(self._collect(request, held), self._timeout)
        except asyncio.TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._timeout:g} s",
                code="timeout",
                headers={"Connection": "close"},
            ) from None

    async def _collect(self, request: Request, held: "Held") -> bytes:
        pieces: list[bytes] = []
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            if held.bytes + len(piece) > self.max_body:
                pieces.clear()
                await _discard(request.receive, self.max_body)
                raise self._too_large(None)
            try:
                held.take(len(piece))
            except ApiError:
                pieces.clear()
                await _discard(request.receive, self.max_body)
                raise
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _too_large(self, length: int | None) -> ApiError:
        size = f"{length:,} bytes" if length else f"more than {self.max_body:,} bytes"
        return ApiError(
            413,
            f"the body has {size}; the limit is {self.max_body:,}: send smaller or fewer pictures, "
            "or start the service with a larger --max-body",
            code="request_too_large",
            headers={"Connection": "close"},
        )


class Held:
    """What one request holds of the sum."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.bytes = 0

    def take(self, count: int) -> None:
        """Raises ApiError 429 where the sum would pass its limit."""
        intake = self._intake
        if intake.held + count > intake.budget:
            raise busy(
                f"requests that are being read hold {intake.held:,} of {intake.budget:,} bytes; "
                "try again"
            )
        intake.held += count
        self.bytes += count

    def give_back(self, count: int) -> None:
        """Some of it."""
        self._intake.held -= count
        self.bytes -= count


def _check_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"content-type is {given[:60]!r}; send application/json",
            code="unsupported_media_type",
        )


async def _discard(receive: Any, limit: int) -> None:
    """Read on for a while: who is still sending does not see an answer before it is done."""

    async def read() -> None:
        seen = 0
        while seen <= limit:
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return
            seen += len(message.get("body", b""))

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), DRAIN_SECONDS)
