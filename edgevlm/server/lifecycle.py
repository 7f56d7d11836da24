"""From a bound socket to exit status 0: uvicorn, signals, readiness, and a slow client's limits."""

import asyncio
import contextlib
import http
import logging
import os
import signal
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgevlm.server.errors import ApiError
from edgevlm.server.service import Service
from edgevlm.server.settings import Settings, SettingsError, addresses

logger = logging.getLogger(__name__)

MAX_HEADERS = 16 * 1024  # bytes
BACKLOG = 128
CLOSING = 5  # s, for connections to take the last bytes


def bind(settings: Settings) -> socket.socket:
    """A bound socket that does not listen yet. Raises SettingsError in one sentence."""
    family, address = addresses(settings.host, settings.port)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, settings.port))
    except OSError as error:
        sock.close()
        raise SettingsError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; "
            "stop what uses it, or choose another with --port"
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Where clients find it."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Protocol(H11Protocol):
    """uvicorn's, with what it lacks.

    A limit on how long the first line and headers may take, a limit on connections, refusals in
    our shape, and the kernel told to drop a peer that takes nothing.
    """

    header_timeout = 10.0
    send_timeout = 60.0
    max_connections = 256
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            text = f"{self.max_connections} connections are open, which is the limit; try again"
            self._refuse(ApiError(503, text, code="too_many_connections"))
            return
        self._timer = self.loop.call_later(self.header_timeout, self._late)
        sock = transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):
            timeout = int(self.send_timeout * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)

    def data_received(self, data: bytes) -> None:
        """Stop the clock when a request's headers are there; start it with the next one's."""
        super().data_received(data)
        if self._answering():
            self._stop_clock()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.header_timeout, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more to wait for."""
        self._stop_clock()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Not HTTP, or headers beyond the limit."""
        if self._answering() and self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        body = bytes(error.response().body)
        reason = http.HTTPStatus(error.status).phrase
        head = (
            f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _late(self) -> None:
        self._timer = None
        if not self._answering():
            self.transport.close()

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """uvicorn's, whose signals are ours."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave them alone: `handle_signals` has them."""
        yield

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT end the service in order; the second one at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: int) -> None:
        if self._draining is None:
            self.drain()
            return
        logger.warning("second signal: ending at once")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def drain(self) -> None:
        """No new requests; those that are there get the grace period; then the end."""
        service = self._service
        if self._draining is None:
            service.draining = True
            notify("STOPPING=1")
            self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        grace = self._service.settings.grace
        logger.info("shutting down; running answers get %g s", grace)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._service.engine.drain, grace)
        finally:
            self.should_exit = True


def make_server(app: Any, service: Service) -> Server:
    """A server for one socket."""
    settings = service.settings

    class Bounded(Protocol):
        header_timeout = settings.header_timeout
        send_timeout = settings.send_timeout
        max_connections = settings.max_connections

    config = uvicorn.Config(
        app,
        http=Bounded,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="info" if settings.access_log else "warning",
        access_log=settings.access_log,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(settings.idle_timeout),
        timeout_graceful_shutdown=CLOSING,
        h11_max_incomplete_event_size=MAX_HEADERS,
    )
    return Server(config, service)


async def serve(
    server: Server, sock: socket.socket, ready: Callable[[], None], signals: bool = True
) -> None:
    """Listen until told to end. `ready` is called once connections are taken."""
    if signals:
        server.handle_signals()
    announcing = asyncio.ensure_future(_announce(server, ready))
    try:
        await server.serve(sockets=[sock])
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


async def _announce(server: Server, ready: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    ready()
    notify("READY=1")
    period = int(os.environ.get("WATCHDOG_USEC", "0") or 0) / 2e6
    while period > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(period)


def notify(message: str) -> None:
    """systemd's sd_notify, where it listens."""
    place = os.environ.get("NOTIFY_SOCKET")
    if not place:
        return
    address = "\0" + place[1:] if place.startswith("@") else place
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(message.encode(), address)
