"""One POST from its first byte to its last: admitted, read, checked, answered, or taken back."""

import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgevlm.server.errors import from_error
from edgevlm.server.feed import unless_gone
from edgevlm.server.intake import ClientGone, Held
from edgevlm.server.outgoing import Outgoing
from edgevlm.server.service import Service
from edgevlm.server.validation import param_of, parse

M = TypeVar("M", bound=BaseModel)
# Prepares what was asked (while its body still counts), and gives what answers it.
Prepare = Callable[[Service, M, str, Held], Awaitable[Callable[[Outgoing], Awaitable[None]]]]


class Exchange(Response, Generic[M]):
    """A response that reads its own request. `prefix` begins its id."""

    def __init__(self, service: Service, schema: type[M], prepare: Prepare[M], prefix: str) -> None:
        super().__init__()
        self._service, self._schema, self._prepare = service, schema, prepare
        self._id = prefix + secrets.token_hex(12)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        service = self._service
        out = Outgoing(send, service.settings.send_timeout, self._id)
        try:
            service.check_open()
            with service.intake.admitted():
                await self._exchange(Request(scope, receive), out)
        except ClientGone:
            service.metrics.client_gone()
        except Exception as error:
            api = from_error(error, param_of(error, self._schema))
            service.metrics.refused(api.status)
            await self._fail(out, api)

    async def _exchange(self, request: Request, out: Outgoing) -> None:
        service = self._service
        async with service.intake.body(request) as (body, held):
            call = await service.workers.run(parse, self._schema, body)
            del body
            answer = await unless_gone(
                request.receive, self._prepare(service, call, self._id, held)
            )
        await unless_gone(request.receive, answer(out))

    async def _fail(self, out: Outgoing, error: Any) -> None:
        try:
            await out.fail(error)
        except ClientGone:
            self._service.metrics.client_gone()


def openapi_body(schema: type[BaseModel]) -> dict[str, Any]:
    """What the OpenAPI document says of a body that FastAPI does not read itself."""
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }
