"""What the bodies of the three ways to ask have in common."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator

from edgevlm.errors import BadParameter
from edgevlm.sampling import MAX_LOGPROBS, SamplingParams

MAX_STOPS, MAX_STOP_LENGTH = 16, 512
MAX_LABELS, MAX_LABEL = 16, 512


class Strict(BaseModel):
    """JSON types as they are ("5" is no number), and no field that is not declared."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


class Off:
    """Marks a field of OpenAI's that we cannot honour: only values that mean its absence."""

    def __init__(self, because: str, *more: Any) -> None:
        self.because, self.accepted = because, (None, *more)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler.generate_schema(Annotated[Any, PlainValidator(self._checked)])

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.accepted), "description": self.because}

    def _checked(self, value: Any) -> Any:
        if not any(value == a and type(value) is type(a) for a in self.accepted):
            shown = ", ".join(json.dumps(a) for a in self.accepted)
            raise ValueError(f"{self.because}; leave it out (accepted: {shown})")
        return value


def _stops(value: str | list[str] | None) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are possible")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise ValueError(
                f"a stop string has {len(text)} characters, not 1 to {MAX_STOP_LENGTH}"
            )
    return stops


Stop = Annotated[str | list[str] | None, AfterValidator(_stops)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Labels = Annotated[dict[str, Label], Field(max_length=MAX_LABELS)]
LogitBias = Annotated[dict[str, float], Field(max_length=1024)]
Detail = Literal["auto", "low", "high", "original", "strict"]


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Off("chunks are not padded", False)] = None


class Sampling(Strict):
    """Fields of `SamplingParams` under OpenAI's names, and those that OpenAI lacks."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="beyond OpenAI: keep the K likeliest tokens")
    min_p: float | None = Field(None, description="beyond OpenAI")
    repetition_penalty: float | None = Field(None, description="beyond OpenAI")
    ignore_eos: bool | None = Field(None, description="beyond OpenAI: go on after the model's end")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    stop: Stop = None

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises BadParameter, which names the field."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_bias(self.logit_bias),
            seed=self.seed,
            stop=tuple(self.stop or ()),
            max_tokens=max_tokens,
            logprobs=logprobs,
            ignore_eos=bool(self.ignore_eos),
        )


def _bias(given: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    pairs = []
    for token, bias in (given or {}).items():
        if not (token.isascii() and token.isdigit()):
            raise BadParameter(f"logit_bias has the key {token[:40]!r}, which is no token id")
        pairs.append((int(token[:20]), bias))
    return tuple(pairs)


def logprobs_count(logprobs: bool | None, top: int | None) -> int | None:
    """OpenAI's pair of fields as one number. Raises BadParameter."""
    if top is not None and not logprobs:
        raise BadParameter(f"top_logprobs is {top} but logprobs is not true; set logprobs as well")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise BadParameter(f"top_logprobs is {top}; it must be at least 0, at most {MAX_LOGPROBS}")
    return (top or 0) if logprobs else None


class JSONSchema(Strict):
    """`json_schema` of a response format. `strict` false is obeyed like true."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Function(Strict):
    """A tool's function. Its arguments always obey `parameters`, with `strict` or without."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
