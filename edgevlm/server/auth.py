"""Who may ask at all: an API key, or on loopback without one a Host header that means this machine.

Both stand before routing, so that a new route is covered by default.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from edgevlm.server.errors import ApiError

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class ApiKeys:
    """ASGI: everything but `open_routes` needs `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_routes: frozenset[str]) -> None:
        self._app, self._open = app, open_routes
        # Digests have one length, so that comparing tells nothing about a key's.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] != "http" or scope["path"] in self._open or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All of them, always: which one matched must not show in the time.
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


class LocalHosts:
    """ASGI: only Host headers that name this machine.

    Without it any web page could reach a service without a key, through a name of its own that
    resolves to 127.0.0.1.
    """

    def __init__(self, app: ASGIApp, more: Sequence[str]) -> None:
        self._app = app
        self._names = LOCAL_NAMES | {name.lower() for name in more}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] != "http" or self._known(Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403,
            "the Host header names no address of this machine; start the service with "
            "--allow-host NAME, or with an API key",
            code="host_not_allowed",
        )
        await error.response()(scope, receive, send)

    def _known(self, host: str) -> bool:
        host = host.lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        return name in self._names or host in self._names
