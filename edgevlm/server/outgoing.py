"""What goes out: one JSON document, or server-sent events; and errors in whichever has begun.

A reader that takes nothing for a while is given up.
"""

import json
from typing import Any

import anyio
from starlette.types import Send

from edgevlm.server.errors import ApiError
from edgevlm.server.intake import ClientGone

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"


class Outgoing:
    """The sending half of an exchange."""

    def __init__(self, send: Send, timeout: float, request_id: str) -> None:
        self._send, self._timeout, self._id = send, timeout, request_id
        self.started = False
        self.sequence = 0  # of the Responses API's events

    async def json(self, document: Any, status: int = 200, **headers: str) -> None:
        """A whole answer."""
        body = json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, {**length, **headers})
        await self._body(body, False)

    async def open_stream(self) -> None:
        """Headers of an event stream; nothing where they were sent already."""
        if not self.started:
            await self._start(200, STREAM_HEADERS)

    async def data(self, document: Any) -> None:
        """`data: {...}`"""
        await self._body(b"data: " + encode(document) + b"\n\n", True)

    async def event(self, kind: str, **fields: Any) -> None:
        """`event: kind` with its number, as the Responses API numbers them."""
        document = {"type": kind, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        await self._body(
            b"event: " + kind.encode() + b"\ndata: " + encode(document) + b"\n\n", True
        )

    async def ping(self) -> None:
        """A comment, which keeps proxies from closing a silent stream."""
        await self._body(b": waiting\n\n", True)

    async def end(self, last: bytes = b"") -> None:
        """The end of a stream."""
        await self._body(last, False)

    async def fail(self, error: ApiError) -> None:
        """The error as the answer, or as the stream's last event."""
        if not self.started:
            headers = {k.lower(): v for k, v in error.headers.items()}
            await self.json(error.body, error.status, **headers)
            return
        if self.sequence:
            await self.event("error", code=error.code, message=error.message, param=error.param)
        else:
            await self.data(error.body)
        await self.end()

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        pairs = [(k.encode(), v.encode()) for k, v in headers.items()]
        pairs.append((b"x-request-id", self._id.encode()))
        await self._out({"type": "http.response.start", "status": status, "headers": pairs})

    async def _body(self, body: bytes, more: bool) -> None:
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    async def _out(self, message: dict[str, Any]) -> None:
        with anyio.move_on_after(self._timeout) as scope:
            await self._send(message)
        if scope.cancelled_caught:
            raise ClientGone


def encode(document: Any) -> bytes:
    """Strict JSON without line ends."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
