"""The FastAPI app: routes, who may ask, and the OpenAPI document."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware

from edgevlm import __version__
from edgevlm.server import chat, completions, errors, health, memory, models, responses
from edgevlm.server.auth import ApiKeys, LocalHosts
from edgevlm.server.exchange import Exchange, openapi_body
from edgevlm.server.schemas.chat import ChatRequest
from edgevlm.server.schemas.completions import CompletionRequest
from edgevlm.server.schemas.errors import ErrorBody
from edgevlm.server.schemas.responses import ResponsesRequest
from edgevlm.server.service import Service

BODIES: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, ResponsesRequest)
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "Your fault; `param` names the field"},
    "5XX": {"model": ErrorBody, "description": "Ours"},
}
STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "An answer, or with `stream` its events", "content": STREAM}
}

router = APIRouter()


@router.post("/v1/chat/completions", responses=ANSWER, openapi_extra=openapi_body(ChatRequest))
async def chat_completions(request: Request) -> Any:
    """OpenAI's chat completions, with pictures."""
    return Exchange(request.app.state.service, ChatRequest, chat.prepare, "chatcmpl-")


@router.post("/v1/completions", responses=ANSWER, openapi_extra=openapi_body(CompletionRequest))
async def text_completions(request: Request) -> Any:
    """OpenAI's older completions: plain text, no chat template."""
    return Exchange(request.app.state.service, CompletionRequest, completions.prepare, "cmpl-")


@router.post("/v1/responses", responses=ANSWER, openapi_extra=openapi_body(ResponsesRequest))
async def create_response(request: Request) -> Any:
    """OpenAI's responses, text and pictures; nothing is stored."""
    return Exchange(request.app.state.service, ResponsesRequest, responses.prepare, "resp_")


def create_app(service: Service) -> FastAPI:
    """The app of one service."""
    settings = service.settings
    # Its pages of documentation load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(title="edgevlm", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for part in (router, models.router, health.router, memory.router):
        app.include_router(part, responses=ERRORS)
    errors.install(app)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    # The last that is added is asked first.
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys, open_routes=settings.open_routes)
    elif settings.loopback:
        app.add_middleware(LocalHosts, more=settings.allow_hosts)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, and the bodies that it does not read itself."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(model, "validation") for model in BODIES],
            ref_template="#/components/schemas/{model}",
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas |= definitions["$defs"]
        app.openapi_schema = document
    return app.openapi_schema
