"""An answer: its pieces while it comes, and the whole at the end. Ids in, text out."""

from dataclasses import dataclass, field
from typing import Any, Literal

from edgevlm.sampling import SamplingParams, TokenLogprobs
from edgevlm.tokenizer import StopStrings, StreamDecoder, Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Generation:
    """A finished answer. `usage`, `timings` (ms) and `memory` (bytes) have the keys of docs."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    usage: dict[str, Any]
    timings: dict[str, float]
    memory: dict[str, int]


@dataclass(frozen=True)
class Delta:
    """One token's piece of an answer, often "" (half a character, a possible stop string).

    The last one has `finish_reason` and the whole `generation`.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    generation: Generation | None = None


class TextAssembly:
    """Ids of one answer become text pieces that end at a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop = StopStrings(params.stop)
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._pieces)

    def push(self, token: int, logprobs: TokenLogprobs | None, ended: FinishReason | None) -> Delta:
        """One more token. `ended`: it is the last one, and why."""
        self.token_ids.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        piece = self._stop.push(self._decoder.push(token))
        if ended and not self._stop.stopped:
            piece += self._stop.push(self._decoder.flush())
            piece += self._stop.flush()
        self._pieces.append(piece)
        reason: FinishReason | None = "stop" if self._stop.stopped else ended
        return Delta(piece, [token], None if logprobs is None else [logprobs], reason)
