"""One model and all that a service keeps beside it; what routes ask and how answers are bounded.

Knows no route and no schema.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgevlm.bundle import CHAT_TEMPLATE
from edgevlm.chat_template import template_variables
from edgevlm.generation import Delta
from edgevlm.grammar import GrammarConstraint, Grammars, grammar_bytes
from edgevlm.request import Request
from edgevlm.sampling import SamplingParams
from edgevlm.server import feed
from edgevlm.server.engine import Answering, Engine
from edgevlm.server.errors import ApiError, bad, shutting_down
from edgevlm.server.intake import Intake
from edgevlm.server.metrics import Metrics
from edgevlm.server.pictures import Pictures
from edgevlm.server.settings import Settings
from edgevlm.server.tools import ToolUse
from edgevlm.server.workers import Workers
from edgevlm.token_bytes import TokenBytes

MAX_TEXT = 1 << 20
TOKEN_CHARACTERS = 16  # of text, on an average that no text reaches
PARSED_FACTOR = 5  # a body, and its JSON strings at up to 4 bytes a character
DECODED_BYTES = 8  # of a pixel: Pillow's 4, twice while a picture is turned or resized

Deltas = Callable[[float | None, float | None], AsyncIterator[tuple[int, list[Delta]]]]
Make = Callable[[Callable[[], bool]], Request]  # given: whether nobody waits any more
MakeConstraint = Callable[[Grammars], GrammarConstraint]


@dataclass(frozen=True)
class Line:
    """A line of the service's own ledger: the most that it can hold, and why."""

    name: str
    bytes: int
    formula: str


class Service:
    """Belongs to one event loop. Close it after the loop has ended."""

    def __init__(self, engine: Engine, settings: Settings, names: Sequence[str]) -> None:
        """`names`: what the model is called; the first is shown."""
        self.engine, self.settings = engine, settings
        self.names = tuple(names)
        manifest = engine.bundle.manifest
        self.limits = manifest.limits
        self.created = int(time.time())
        self.workers = Workers(settings.workers)
        self.decoding = asyncio.Lock()  # one picture's pixels at a time
        self.token_bytes = TokenBytes(engine.tokenizer)
        eos = manifest.model.generation.eos_token_ids
        self.eos = frozenset(eos)
        self.grammars = Grammars(engine.tokenizer, self.token_bytes, eos)
        self.intake = Intake(
            settings.max_body,
            settings.body_budget,
            self.limits.slots + settings.max_queue + settings.workers,
            settings.body_timeout,
        )
        self.pictures = Pictures(settings, self.workers, self.limits.max_images)
        self.metrics = Metrics(engine, self.intake)
        self.draining = False

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the weights and their build (OpenAI's `system_fingerprint`)."""
        files = self.engine.bundle.manifest.files
        text = "".join(f"{name}{files[name].sha256}" for name in sorted(files))
        return "edgevlm-" + hashlib.sha256(text.encode()).hexdigest()[:12]

    @functools.cached_property
    def knows_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        path = self.engine.bundle.file(CHAT_TEMPLATE)
        return path.is_file() and "tools" in template_variables(path.read_text(encoding="utf-8"))

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.names[0]

    def ledger(self) -> list[Line]:
        """What the service itself may hold beside the model's plan, each line at its worst."""
        settings, limits = self.settings, self.limits
        waiting = limits.slots + settings.max_queue
        return [
            Line(
                "server.bodies",
                settings.body_budget * PARSED_FACTOR,
                f"2 x max_body {settings.max_body:,} x {PARSED_FACTOR} (bytes, then JSON strings)",
            ),
            Line(
                "server.decoding",
                settings.max_image_pixels * DECODED_BYTES if limits.max_images else 0,
                f"max_image_pixels {settings.max_image_pixels:,} x {DECODED_BYTES}, one at a time",
            ),
            Line(
                "server.pictures",
                waiting * limits.max_images * limits.max_pixels * 3,
                f"(slots + max_queue) {waiting} x {limits.max_images} x {limits.max_pixels:,} x 3",
            ),
            Line(
                "server.grammars",
                grammar_bytes(len(self.token_bytes), limits.slots, settings.max_queue),
                f"{len(self.token_bytes):,} tokens x 256, {limits.slots} answers x 32 MiB, "
                f"{waiting} grammars x 2 MiB",
            ),
        ]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not this one."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here; this is {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def check_open(self) -> None:
        """Raise ApiError 503 while shutting down."""
        if self.draining:
            raise shutting_down()

    def check_tools(self, tools: ToolUse) -> None:
        """Raise ApiError 400 where the model was never told of tools."""
        if tools.on and not self.knows_tools:
            raise bad(
                "tools",
                "tools are given but this model's chat template knows none; leave them out, or "
                "serve a model that was trained for them",
            )

    def check_text(self, characters: int, what: str) -> None:
        """Raise ApiError 400 for text that could not fit however it is cut into tokens."""
        most = max(MAX_TEXT, TOKEN_CHARACTERS * self.limits.max_seq_len)
        if characters > most:
            raise bad(
                what,
                f"{what} has {characters:,} characters of text; this bundle was built for "
                f"{self.limits.max_seq_len:,} tokens and reads at most {most:,}",
                "context_length_exceeded",
            )

    def check_n(self, n: int, what: str = "n") -> None:
        """Raise ApiError 400 for more answers than could ever be waiting."""
        most = self.limits.slots + self.settings.max_queue
        if n > most:
            raise bad(what, f"{what} asks for {n} answers; this service can hold {most} at once")

    async def prepare(self, make: Make, pictures: bool) -> Request:
        """A request out of `make`, in a worker; encoded pictures are let go of."""
        if not pictures:
            return await self._made(make)
        async with self.decoding:
            return _without_sources(await self._made(make))

    async def _made(self, make: Make) -> Request:
        """A thread cannot be stopped: who is cancelled says so to `make`, and waits for it."""
        gone = threading.Event()
        work = asyncio.ensure_future(self.workers.run(make, gone.is_set))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            gone.set()
            await asyncio.gather(work, return_exceptions=True)
            raise

    async def constraints(
        self, make: MakeConstraint | None, count: int
    ) -> list[GrammarConstraint | None]:
        """One for each answer: each walks by itself."""
        if make is None:
            return [None] * count
        return list(await self.workers.run(lambda: [make(self.grammars) for _ in range(count)]))

    @contextlib.asynccontextmanager
    async def asked(
        self, requests: Sequence[Request], constraints: Sequence[GrammarConstraint | None]
    ) -> AsyncIterator[Deltas]:
        """Submit all or none; what is not finished when the block ends is cancelled.

        Gives a function: seconds of silence after which to hear of it, the first time and later ->
        the answers' deltas.
        """
        self.check_open()
        bell = feed.Bell()
        answers: list[Answering] = []
        try:
            for request, constraint in zip(requests, constraints, strict=True):
                answers.append(
                    self.engine.submit(
                        request,
                        deadline=self.settings.deadline,
                        notify=bell.ring,
                        constraint=constraint,
                    )
                )
            yield lambda first, later: feed.deltas(answers, bell, first, later)
        finally:
            for answer in answers:
                answer.cancel()

    def close(self) -> None:
        """End the workers; the engine is its owner's."""
        self.workers.close()


def seeded(request: Request, params: SamplingParams, index: int) -> Request:
    """The request for answer number `index` of n: each draws differently, and repeatably."""
    if index == 0 or params.seed is None:
        return request
    return request.with_seed(params.seed + index)


def _without_sources(request: Request) -> Request:
    """The pixels are there now; of the files only the sizes are still asked for."""
    images = tuple(dataclasses.replace(image, source=b"") for image in request.prompt.images)
    return dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, images=images))


def usage_of(generations: Sequence[Any]) -> dict[str, Any]:
    """OpenAI's `usage` of answers to one prompt each; the prompt counts once for its n answers."""
    first = generations[0].usage
    completion = sum(g.usage["completion_tokens"] for g in generations)
    return {
        "prompt_tokens": first["prompt_tokens"],
        "completion_tokens": completion,
        "total_tokens": first["prompt_tokens"] + completion,
        "prompt_tokens_details": {
            "cached_tokens": first["cached_tokens"],
            "image_tokens": first["image_tokens"],
        },
    }
