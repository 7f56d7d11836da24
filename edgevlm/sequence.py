"""One request on its way through the scheduler: its sampler, its text, its times, its end.

Logits in, deltas out. Knows no executor and no other request.
"""

import dataclasses
import time
from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from edgevlm.answer import Mailbox
from edgevlm.errors import Cancelled, DeadlineExceeded, EdgeVLMError, ExecutorError
from edgevlm.generation import Delta, FinishReason, Generation, TextAssembly
from edgevlm.request import Request
from edgevlm.sampling import Constraint, Sampler

Memory = Callable[[], dict[str, int]]


class RunningRequest:
    """What a request has become so far. Only the scheduler's thread touches it once submitted."""

    def __init__(
        self,
        request: Request,
        sampler: Sampler,
        text: TextAssembly,
        mailbox: Mailbox,
        *,
        eos: Collection[int],
        constraint: Constraint | None = None,
        deadline: float | None = None,
        load_ms: float = 0.0,
    ) -> None:
        """`deadline`: seconds from now; None: it may take as long as it takes."""
        self.request, self.mailbox = request, mailbox
        self.submitted = self.last = time.perf_counter()
        self.admitted = self.first = self.submitted
        self.cached = 0
        self.token = -1
        self._sampler, self._text, self._constraint = sampler, text, constraint
        self._eos = () if request.params.ignore_eos else eos
        self._seconds = deadline
        self._deadline = None if deadline is None else self.submitted + deadline
        self._count = 0
        self.timings = {
            "load_ms": load_ms,
            "preprocess_ms": request.preprocess_ms,
            "queue_ms": 0.0,
            "vision_ms": 0.0,
            "prefill_ms": 0.0,
            "first_token_ms": 0.0,
            "decode_ms": 0.0,
        }

    def over(self, now: float) -> EdgeVLMError | None:
        """Why it has to end before its time, if it has to."""
        if self.mailbox.cancelled:
            return Cancelled(f"the request was cancelled after {self._count} tokens")
        if self._deadline is not None and now >= self._deadline:
            return DeadlineExceeded(
                f"the request was not finished after {self._seconds:g} s, its deadline, and had "
                f"{self._count} tokens; ask for fewer tokens or give it longer"
            )
        return None

    def sample(self, logits: NDArray[np.float32]) -> Delta:
        """The next token's delta out of logits [vocab]; `finish_reason` where it is the last.

        Raises ExecutorError where the logits are not finite, and what a constraint raises.
        """
        token, logprobs = self._sampler.sample(logits, self._constraint)
        self.token = token
        self._count += 1
        ended: FinishReason | None = None
        if self._constraint is not None and self._constraint.accept(token):
            ended = "stop"
        elif token in self._eos:
            ended = "stop"
        elif self._count == self.request.max_tokens:
            ended = "length"
        now = time.perf_counter()
        if self._count == 1:
            waited = (now - self.submitted) * 1e3
            self.timings["first_token_ms"] = self.request.preprocess_ms + waited
            self.first = now
        self.timings["decode_ms"] = (now - self.first) * 1e3
        self.last = now
        return self._text.push(token, logprobs, ended)

    @property
    def count(self) -> int:
        """Tokens of the answer so far."""
        return self._count

    def finished(self, last: Delta, memory: dict[str, int]) -> Delta:
        """The last delta, with the whole answer."""
        assert last.finish_reason is not None
        request, text = self.request, self._text
        generation = Generation(
            text=text.text,
            token_ids=text.token_ids,
            logprobs=text.logprobs,
            finish_reason=last.finish_reason,
            usage={
                "prompt_tokens": request.prompt_tokens,
                "completion_tokens": len(text.token_ids),
                "image_tokens": request.image_tokens,
                "cached_tokens": self.cached,
                "images": request.images,
            },
            timings={name: round(ms, 3) for name, ms in self.timings.items()},
            memory=memory,
        )
        return dataclasses.replace(last, generation=generation)


def as_error(error: Exception) -> EdgeVLMError:
    """What a caller is told of anything that went wrong: a new object for each of them."""
    if isinstance(error, EdgeVLMError):
        return type(error)(str(error))
    return ExecutorError(f"this request failed inside edgevlm: {type(error).__name__}: {error}")
