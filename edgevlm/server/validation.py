"""A body becomes a checked request, or a 400 that names the field that is wrong."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from edgevlm.server.errors import ApiError, bad

M = TypeVar("M", bound=BaseModel)
_FIELD = re.compile(r"([a-z_]+)(?:\[\d+\]|\.[a-z_]+)*")


def parse(model: type[M], body: bytes) -> M:
    """`body` as `model`. Raises ApiError 400."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(
            400, f"the body is not valid JSON: {reason[:200]}", code="invalid_json"
        ) from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return check(model, data)


def check(model: type[M], data: Mapping[str, Any]) -> M:
    """`data` as `model`. Raises ApiError 400."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise explain(error, data) from None
    except RecursionError:
        raise bad(None, "the body is nested too deeply", "invalid_json") from None


def explain(error: ValidationError, data: Mapping[str, Any]) -> ApiError:
    """The one complaint that lies deepest: of a union, the choice that fitted best."""
    # Without `input`: it may hold a picture.
    complaints = error.errors(include_url=False, include_context=True, include_input=False)
    places = [_place(data, e["loc"], e["type"]) for e in complaints]
    best = max(range(len(complaints)), key=lambda i: (len(places[i][0]), -i))
    path, value = places[best]
    param = _dotted(path)
    kind = complaints[best]["type"]
    text = complaints[best]["msg"]
    if kind == "extra_forbidden":
        return bad(
            param, f"{param} is not a field of this request, or not supported", "unknown_parameter"
        )
    if kind == "missing":
        return bad(param, f"{param} is missing", "missing_required_parameter")
    text = text.removeprefix("Value error, ")
    if kind == "value_error":
        return bad(param, text if text.startswith(param) else f"{param}: {text}")
    return bad(param, f"{param} is {_shown(value)}: {text[0].lower()}{text[1:]}")


def _place(data: Any, loc: tuple[int | str, ...], kind: str) -> tuple[list[int | str], Any]:
    """The part of `loc` that leads through the data: pydantic mixes in the names of its types."""
    path: list[int | str] = []
    for i, step in enumerate(loc):
        last = i == len(loc) - 1
        if isinstance(data, Mapping) and (step in data or last and kind == "missing"):
            path.append(step)
            data = data.get(str(step))
        elif isinstance(data, list) and isinstance(step, int) and step < len(data):
            path.append(step)
            data = data[step]
    return path, data


def _dotted(path: list[int | str]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.lstrip(".")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return json.dumps(value)[:60]


def param_of(error: BaseException, model: type[BaseModel]) -> str | None:
    """The field that one of our own sentences begins with, if it is one of `model`."""
    match = _FIELD.match(str(error))
    if match is None or match[1] not in model.model_fields:
        return None
    return match[0].rstrip(".")
