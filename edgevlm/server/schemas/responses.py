"""The body of POST /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from edgevlm.errors import BadParameter
from edgevlm.sampling import SamplingParams
from edgevlm.server.schemas.base import (
    Detail,
    Label,
    Labels,
    Off,
    Sampling,
    Strict,
    logprobs_count,
)


class InputText(Strict):
    """Text that the model reads."""

    type: Literal["input_text"]
    text: str


class InputImage(Strict):
    """A picture that the model sees."""

    type: Literal["input_image"]
    image_url: str | None = None
    detail: Detail | None = None
    file_id: Annotated[Any, Off("files are not stored; send image_url")] = None

    @model_validator(mode="after")
    def _url(self) -> "InputImage":
        if self.image_url is None:
            raise ValueError("image_url is missing")
        return self


class OutputText(Strict):
    """Text that the model wrote before."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[Any, Off("annotations cannot be shown to this model", [])] = None
    logprobs: Any = Field(None, description="of an earlier answer; nothing depends on them")


Part = Annotated[InputText | InputImage | OutputText, Field(discriminator="type")]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Strict):
    """A turn; `type` may be left out. `id` and `status` come back from earlier answers."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Part], Field(min_length=1)]
    id: str | None = None
    status: Status | None = None
    phase: Annotated[Any, Off("phases are not known to this model", "final_answer")] = None


class FunctionCall(Strict):
    """A call that the model made before."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Strict):
    """What that call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[Part], Field(min_length=1)]
    id: str | None = None
    status: Status | None = None


def _kind(item: Any) -> str:
    given = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "")
    return given if isinstance(given, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="type must be message, function_call or function_call_output",
    ),
]


class TextFormat(Strict):
    """`text.format`; the Responses API writes a schema flat."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema(self) -> "TextFormat":
        flat = self.name is not None and self.schema_ is not None
        if (self.type == "json_schema") != flat:
            raise ValueError("name and schema go with type json_schema, and with it alone")
        return self


class TextOptions(Strict):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, Off("the model's verbosity cannot be set", "medium")] = None


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Strict):
    """`tool_choice` that forces one function."""

    type: Literal["function"]
    name: str


class ResponseStreamOptions(Strict):
    """`stream_options`."""

    include_obfuscation: Annotated[Any, Off("events are not padded", False)] = None


class ResponsesRequest(Sampling):
    """Nothing is stored: every request brings all that was said before."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    metadata: Labels | None = None
    # Names for the caller's own use; they change nothing in an answer, at OpenAI's either.
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    # Known, and only "off" is possible.
    store: Annotated[Any, Off("answers are not stored; send store false", False)] = None
    previous_response_id: Annotated[
        Any, Off("answers are not stored; send what was said in input")
    ] = None
    conversation: Annotated[Any, Off("answers are not stored; send what was said in input")] = None
    background: Annotated[Any, Off("answers are not stored; stream them", False)] = None
    background_options: Annotated[Any, Off("answers are not stored; stream them")] = None
    truncation: Annotated[Any, Off("input is never cut silently", "disabled")] = None
    reasoning: Annotated[Any, Off("the model's reasoning cannot be set")] = None
    service_tier: Annotated[Any, Off("there is one tier", "auto", "default")] = None
    prompt: Annotated[Any, Off("stored prompts are not known here")] = None
    max_tool_calls: Annotated[Any, Off("there are no built-in tools")] = None
    context_management: Annotated[Any, Off("input is never cut silently", [])] = None
    moderation: Annotated[Any, Off("there is no moderation here")] = None
    image: Annotated[Any, Off("pictures have no options here")] = None
    access_programs: Annotated[Any, Off("there are no access programs here")] = None
    prompt_cache_options: Annotated[Any, Off("the prefix cache has no options")] = None
    prompt_cache_retention: Annotated[Any, Off("the prefix cache has no options", "in_memory")] = (
        None
    )

    @property
    def wants_logprobs(self) -> bool:
        """Either way to ask for them."""
        return bool(self.include) or self.top_logprobs is not None

    def params(self) -> SamplingParams:
        """Raises BadParameter."""
        if self.stream_options is not None and not self.stream:
            raise BadParameter("stream_options is given but stream is not true")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise BadParameter(
                f"max_output_tokens is {self.max_output_tokens}; it must be at least 1"
            )
        count = logprobs_count(self.wants_logprobs or None, self.top_logprobs)
        return self.sampling(self.max_output_tokens, count)
