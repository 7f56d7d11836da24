"""A real uvicorn in a thread, on a free port, and a plain client of it."""

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from edgevlm.server.app import create_app
from edgevlm.server.engine import Engine
from edgevlm.server.lifecycle import Server, bind, make_server, serve
from edgevlm.server.service import Service
from edgevlm.server.settings import Settings

PATIENCE = 60.0  # s: how long a test waits for anything before it fails


@dataclass
class Reply:
    """An answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"] and ".py" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The `data:` of a stream, parsed; comments are left out."""
        return [parsed(line) for line in data_lines(self.body)]


def data_lines(body: bytes) -> list[str]:
    lines = [part for part in body.decode().split("\n") if part.startswith("data: ")]
    return [line.removeprefix("data: ") for line in lines]


def parsed(line: str) -> Any:
    return line if line == "[DONE]" else json.loads(line)


@dataclass
class Running:
    """A service that listens."""

    port: int
    service: Service
    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {"Connection": "close", **(headers or {})}
        if raw is not None:
            given.setdefault("Content-Type", "application/json")
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, raw, given)
            reply = connection.getresponse()
            found = {k.lower(): v for k, v in reply.getheaders()}
            return Reply(reply.status, found, reply.read())

    def get(self, path: str, **headers: str) -> Reply:
        return self.call("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.call("POST", path, body, headers)

    def chat(self, content: Any = "Hi", **fields: Any) -> Reply:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})


@contextlib.contextmanager
def serving(engine: Engine, **settings: Any) -> Iterator[Running]:
    """Listen until the block ends. The engine stays open: it is the test's."""
    given = replace(Settings(port=0), **settings)
    given.check()
    started = threading.Event()
    found: list[Running] = []
    failed: list[BaseException] = []

    async def main() -> None:
        with bind(given) as sock:
            service = Service(engine, given, given.model_names or ("tiny",))
            try:
                server = make_server(create_app(service), service)
                port = sock.getsockname()[1]
                found.append(Running(port, service, server, asyncio.get_running_loop()))
                await serve(server, sock, started.set, signals=False)
            finally:
                service.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="service")
    thread.start()
    try:
        assert started.wait(PATIENCE)
        if failed:
            raise failed[0]
        yield found[0]
    finally:
        if found:
            found[0].server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the service did not end"
    if failed:
        raise failed[0]


def wait_until(condition: Any, what: str) -> None:
    """Poll, for as long as a slow machine may need."""
    gone = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if condition():
            return
        gone.wait(0.01)
    raise AssertionError(f"{what} did not happen within {PATIENCE:g} s")
