"""Errors as OpenAI writes them: {"error": {message, type, param, code}}, and what maps to what.

No message carries a traceback, and none of ours a path of this machine.
"""

import logging
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from edgevlm.errors import (
    BadImage,
    BadParameter,
    BusyError,
    Cancelled,
    DeadlineExceeded,
    EdgeVLMError,
    PromptTooLong,
    RequestError,
    ShuttingDown,
    TooManyImages,
)

logger = logging.getLogger(__name__)

RETRY_AFTER = 1.0  # seconds, where nothing better is known
CODES: dict[type[EdgeVLMError], str] = {
    PromptTooLong: "context_length_exceeded",
    TooManyImages: "too_many_images",
    BadImage: "invalid_image",
    BadParameter: "invalid_value",
}
PATH = re.compile(r"(?<![\w.])/[\w.~@+-]+(?:/[\w.~@+-]*)+")
MESSAGES = {
    404: "there is no route {path}; GET /openapi.json lists them",
    405: "{path} does not answer to {method}",
}


class ApiError(Exception):
    """An answer that is an error. `kind` is OpenAI's `type`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind or _kind(status)
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON document."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """As an HTTP answer."""
        return JSONResponse(self.body, self.status, self.headers)


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def bad(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, retry_after: float | None = None) -> ApiError:
    """A 429 that says when to come back."""
    seconds = max(1, round(retry_after or RETRY_AFTER))
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})


def shutting_down() -> ApiError:
    """A 503: the service is about to end."""
    return ApiError(
        503,
        "the service is shutting down and takes no new requests; try again when it is back",
        code="shutting_down",
        headers={"Retry-After": "5", "Connection": "close"},
    )


def from_error(error: BaseException, param: str | None = None) -> ApiError:
    """Any exception as an answer; one that is not ours is logged and its text kept here."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ShuttingDown):
        return shutting_down()
    if isinstance(error, BusyError):
        return busy(str(error), getattr(error, "retry_after", None))
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), code="deadline_exceeded", kind="timeout_error")
    if isinstance(error, Cancelled):
        return ApiError(499, str(error), code="cancelled")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=param, code=CODES.get(type(error)))
    if isinstance(error, EdgeVLMError):
        logger.error("request failed: %s", error)
        return ApiError(500, PATH.sub("(a file)", str(error)), code=type(error).__name__)
    logger.error("this is a bug in edgevlm", exc_info=error)
    return ApiError(500, f"{type(error).__name__} inside the service; its log has more")


def install(app: FastAPI) -> None:
    """Every error of the app in this shape."""
    app.add_exception_handler(ApiError, _handle)
    app.add_exception_handler(EdgeVLMError, _handle)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(Exception, _handle)


async def _handle(request: Request, error: Exception) -> JSONResponse:
    return from_error(error).response()


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    text = MESSAGES.get(error.status_code, str(error.detail))
    text = text.format(path=request.url.path[:100], method=request.method)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers or {})
    return ApiError(error.status_code, text, code=code, headers=headers).response()


async def _validation(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's own checks: query strings and paths. Bodies are checked in `validation`."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    return bad(param, f"{param}: {first['msg']}").response()
