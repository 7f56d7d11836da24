"""What the service needs of a model: `VLM` is one, and so is whatever tests put in its place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from edgevlm.bundle import Bundle
from edgevlm.generation import Delta
from edgevlm.images import ImageSource, OpenImage
from edgevlm.prompt import Messages
from edgevlm.request import Request
from edgevlm.sampling import Constraint, SamplingParams
from edgevlm.stats import Observer, Stats
from edgevlm.tokenizer import Tokenizer


class Answering(Protocol):
    """An answer that is asked now and then whether it has something new."""

    def poll(self) -> Delta | None:
        """The next delta, or None; raises the error that ended the answer."""
        ...

    def cancel(self) -> None:
        """Take the request back."""
        ...


class Engine(Protocol):
    """The verbs of `VLM` that the service uses; docs are there."""

    bundle: Bundle

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        ...

    def prepare(
        self,
        prompt: str | Messages,
        images: Sequence["ImageSource | OpenImage"] = ...,
        params: SamplingParams | None = ...,
        *,
        variables: Mapping[str, Any] | None = ...,
        cancelled: Callable[[], bool] | None = ...,
    ) -> Request: ...

    def prepare_text(self, text: str, params: SamplingParams | None = ...) -> Request: ...

    def submit(
        self,
        request: Request,
        *,
        deadline: float | None = ...,
        notify: Callable[[], object] | None = ...,
        constraint: Constraint | None = ...,
    ) -> Answering: ...

    def drain(self, grace: float) -> None: ...

    def stats(self) -> Stats: ...

    def observe(self, observer: Observer) -> None: ...
