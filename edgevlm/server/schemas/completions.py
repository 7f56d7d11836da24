"""The body of POST /v1/completions."""

from typing import Annotated, Any

from pydantic import Field

from edgevlm.errors import BadParameter
from edgevlm.sampling import SamplingParams
from edgevlm.server.schemas.base import Label, Off, Sampling, StreamOptions

DEFAULT_MAX_TOKENS = 16  # OpenAI's, and what clients of this route expect
MAX_PROMPTS = 64


class CompletionRequest(Sampling):
    """Plain text in, plain text out."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: int | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    logprobs: int | None = None
    echo: bool | None = None
    user: Label | None = None
    suffix: Annotated[Any, Off("text cannot be inserted before a suffix", "")] = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def params(self) -> SamplingParams:
        """Raises BadParameter."""
        if self.stream_options is not None and not self.stream:
            raise BadParameter("stream_options is given but stream is not true")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadParameter(
                f"best_of is {self.best_of}; answers are not ranked: leave it out or set it to n"
            )
        if self.echo and self.logprobs is not None:
            raise BadParameter("echo with logprobs is not supported: prompts have no logprobs here")
        return self.sampling(self.max_tokens, self.logprobs)
