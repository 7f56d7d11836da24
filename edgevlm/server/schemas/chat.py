"""The body of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from edgevlm.errors import BadParameter
from edgevlm.sampling import SamplingParams
from edgevlm.server.schemas.base import (
    Detail,
    Function,
    JSONSchema,
    Label,
    Labels,
    Off,
    Sampling,
    StreamOptions,
    Strict,
    logprobs_count,
)


class TextPart(Strict):
    """{"type": "text"}"""

    type: Literal["text"]
    text: str


class ImageURL(Strict):
    """A picture: data URL; or http(s): and file: where the service was started with them."""

    url: str
    detail: Detail | None = None


class ImageURLPart(Strict):
    """{"type": "image_url"}; the URL may be a plain string."""

    type: Literal["image_url"]
    image_url: ImageURL | str
    detail: Detail | None = None


class ImagePart(Strict):
    """{"type": "image"}, as the Qwen examples write it."""

    type: Literal["image"]
    image: ImageURL | str | None = None
    url: str | None = None
    image_url: ImageURL | str | None = None
    detail: Detail | None = None

    @model_validator(mode="after")
    def _one(self) -> "ImagePart":
        given = [v for v in (self.image, self.url, self.image_url) if v is not None]
        if len(given) != 1:
            raise ValueError("give the picture as one of image, url or image_url")
        return self


Part = Annotated[TextPart | ImageURLPart | ImagePart, Field(discriminator="type")]


class CalledFunction(Strict):
    """What the assistant called."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call in an earlier assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """One turn. Which fields a role may have, and what its content may be, is checked later."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Annotated[Any, Off("an assistant's refusal cannot be shown to this model")] = None
    audio: Annotated[Any, Off("there is no audio here")] = None
    function_call: Annotated[Any, Off("function_call is the old form; use tool_calls")] = None
    annotations: Annotated[Any, Off("annotations cannot be shown to this model", [])] = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """Only its name."""

    name: str


class NamedTool(Strict):
    """`tool_choice` that forces one function."""

    type: Literal["function"]
    function: NamedFunction


class ResponseFormat(Strict):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and with it alone")
        return self


class ChatRequest(Sampling):
    """Every field that OpenAI knows, and some that its servers do not."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Names for the caller's own use; they change nothing in an answer, at OpenAI's either.
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: Labels | None = None
    # Known, and only "off" is possible.
    store: Annotated[Any, Off("answers are not stored", False)] = None
    service_tier: Annotated[Any, Off("there is one tier", "auto", "default")] = None
    modalities: Annotated[Any, Off("answers are text", ["text"])] = None
    audio: Annotated[Any, Off("there is no audio here")] = None
    prediction: Annotated[Any, Off("predicted outputs are not supported")] = None
    reasoning_effort: Annotated[Any, Off("the model's reasoning cannot be set", "none")] = None
    verbosity: Annotated[Any, Off("the model's verbosity cannot be set", "medium")] = None
    web_search_options: Annotated[Any, Off("there is no web search here")] = None
    functions: Annotated[Any, Off("functions is the old form; use tools")] = None
    function_call: Annotated[Any, Off("function_call is the old form; use tool_choice")] = None
    moderation: Annotated[Any, Off("there is no moderation here")] = None
    prompt_cache_options: Annotated[Any, Off("the prefix cache has no options")] = None
    prompt_cache_retention: Annotated[Any, Off("the prefix cache has no options", "in_memory")] = (
        None
    )

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def params(self) -> SamplingParams:
        """Raises BadParameter."""
        if self.stream_options is not None and not self.stream:
            raise BadParameter("stream_options is given but stream is not true")
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise BadParameter(
                f"max_completion_tokens is {new} and max_tokens is {old}; give one of them"
            )
        if new is not None and new < 1:
            raise BadParameter(f"max_completion_tokens is {new}; it must be at least 1")
        tokens = old if new is None else new
        return self.sampling(tokens, logprobs_count(self.logprobs, self.top_logprobs))


def picture_url(part: ImageURLPart | ImagePart) -> tuple[str, str | None]:
    """(url, detail) of a picture's part."""
    given: Any = part.image_url
    if isinstance(part, ImagePart):
        given = next(v for v in (part.image, part.url, part.image_url) if v is not None)
    if isinstance(given, ImageURL):
        return given.url, given.detail or part.detail
    return str(given), part.detail
