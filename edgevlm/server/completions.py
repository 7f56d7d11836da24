"""POST /v1/completions: raw text goes on; no chat template, no pictures."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgevlm.generation import Delta, Generation
from edgevlm.request import Request
from edgevlm.sampling import TokenLogprobs
from edgevlm.server.chat import FIRST_TICK, TICK
from edgevlm.server.intake import Held
from edgevlm.server.logprobs import LogprobWriter, reported
from edgevlm.server.outgoing import DONE, Outgoing
from edgevlm.server.schemas.completions import CompletionRequest
from edgevlm.server.service import Service, seeded, usage_of


async def prepare(
    service: Service, call: CompletionRequest, request_id: str, held: Held
) -> Callable[[Outgoing], Awaitable[None]]:
    """Everything that can be refused is refused here."""
    service.check_model(call.model)
    prompts = [call.prompt] if isinstance(call.prompt, str) else call.prompt
    count = call.n or 1
    service.check_n(count * len(prompts), "n" if len(prompts) == 1 else "prompt")
    service.check_text(sum(map(len, prompts)), "prompt")
    params = call.params()
    requests = []
    for prompt in prompts:
        request = await service.workers.run(service.engine.prepare_text, prompt, params)
        requests += [seeded(request, params, i) for i in range(count)]
    exchange = CompletionExchange(service, call, prompts, count, request_id, requests)
    return exchange.stream if call.stream else exchange.whole


@dataclass
class TextChoice:
    """One answer while it comes. `echo`: what stands before it."""

    index: int
    echo: str
    eos: frozenset[int]
    writer: LogprobWriter | None
    generation: Generation | None = None
    _text: list[str] = field(default_factory=list)
    _entries: list[TokenLogprobs] = field(default_factory=list)
    _unsent: list[TokenLogprobs] = field(default_factory=list)
    _offset: int = 0

    def push(self, news: Sequence[Delta]) -> tuple[str, dict[str, Any] | None]:
        """(text, logprobs) that may go out now."""
        text = "".join(delta.text for delta in news)
        self.generation = news[-1].generation if news else None
        if not self._text:
            text = self.echo + text
        logprobs = None
        if self.writer is not None:
            self._unsent += reported(news, self.eos)
            if self._unsent and (text or self.generation is not None):
                logprobs = self.writer.legacy(self._unsent, self._offset)
                self._entries += self._unsent
                self._unsent = []
        self._text.append(text)
        self._offset += len(text)
        return text, logprobs

    def document(self) -> dict[str, Any]:
        """An element of `choices`."""
        assert self.generation is not None
        return {
            "index": self.index,
            "text": "".join(self._text),
            "logprobs": None if self.writer is None else self.writer.legacy(self._entries, 0),
            "finish_reason": self.generation.finish_reason,
        }


@dataclass
class CompletionExchange:
    """Requests that are ready to be submitted, and the documents of their answers."""

    service: Service
    call: CompletionRequest
    prompts: Sequence[str]
    n: int
    id: str
    requests: Sequence[Request]
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, out: Outgoing) -> None:
        """One document."""
        choices = self._choices()
        async with self.service.asked(self.requests, [None] * len(self.requests)) as deltas:
            async for i, news in deltas(None, None):
                choices[i].push(news)
        document = self._frame([choice.document() for choice in choices])
        await out.json({**document, **self._figures(choices)})

    async def stream(self, out: Outgoing) -> None:
        """Text, one finish_reason for each choice, usage if asked for, [DONE]."""
        choices = self._choices()
        async with self.service.asked(self.requests, [None] * len(self.requests)) as deltas:
            async for i, news in deltas(FIRST_TICK, TICK):
                await out.open_stream()
                if i < 0:
                    await out.ping()
                else:
                    await self._send(out, choices[i], news)
        if self.call.wants_usage:
            await out.data({**self._frame([]), **self._figures(choices)})
        await out.end(DONE)

    async def _send(self, out: Outgoing, choice: TextChoice, news: Sequence[Delta]) -> None:
        text, logprobs = choice.push(news)
        done = choice.generation
        if not text and logprobs is None and done is None:
            return
        document = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if done is None else done.finish_reason,
        }
        frame = self._frame([document])
        if self.call.wants_usage:
            frame["usage"] = None
        await out.data(frame if done is None else {**frame, "timings": done.timings})

    def _choices(self) -> list[TextChoice]:
        service, writer = self.service, None
        if self.call.logprobs is not None:
            writer = LogprobWriter(service.engine.tokenizer, service.token_bytes)
        return [
            TextChoice(i, self.prompts[i // self.n] if self.call.echo else "", service.eos, writer)
            for i in range(len(self.requests))
        ]

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.name,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
        }

    def _figures(self, choices: Sequence[TextChoice]) -> dict[str, Any]:
        """Usage over all prompts; each counts once for its n answers."""
        done = [choice.generation for choice in choices if choice.generation is not None]
        parts = [usage_of(done[i : i + self.n]) for i in range(0, len(done), self.n)]
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage: dict[str, Any] = {name: sum(part[name] for part in parts) for name in names}
        details = [part["prompt_tokens_details"] for part in parts]
        usage["prompt_tokens_details"] = {
            "cached_tokens": sum(each["cached_tokens"] for each in details),
            "image_tokens": 0,
        }
        return {"usage": usage, "timings": done[0].timings}
