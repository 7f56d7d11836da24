"""POST /v1/chat/completions: messages, pictures, tools and formats in; answers or a stream out."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgevlm.generation import Delta, Generation
from edgevlm.grammar import GrammarConstraint
from edgevlm.request import Request
from edgevlm.sampling import TokenLogprobs
from edgevlm.server.conversation import from_chat, tools_of
from edgevlm.server.errors import bad
from edgevlm.server.intake import Held
from edgevlm.server.logprobs import LogprobWriter, reported
from edgevlm.server.outgoing import DONE, Outgoing
from edgevlm.server.schemas.chat import ChatRequest, ResponseFormat
from edgevlm.server.service import MakeConstraint, Service, seeded, usage_of
from edgevlm.server.tools import ToolCall, ToolParser, ToolUse

FIRST_TICK, TICK = 10.0, 15.0  # s: headers go out at the latest after; then a comment so often


async def prepare(
    service: Service, call: ChatRequest, request_id: str, held: Held
) -> Callable[[Outgoing], Awaitable[None]]:
    """Everything that can be refused is refused here."""
    service.check_model(call.model)
    count = call.n or 1
    service.check_n(count)
    params = call.params()
    tools = tools_of(call)
    conversation = from_chat(call)
    service.check_tools(tools)
    service.check_text(conversation.characters, "messages")
    constraint = constraint_for(call.response_format, tools)
    pictures = await service.pictures.load(conversation.pictures, held)

    def make(cancelled: Callable[[], bool]) -> Request:
        return service.engine.prepare(
            conversation.messages,
            pictures,
            params,
            variables=conversation.variables(tools),
            cancelled=cancelled,
        )

    request = await service.prepare(make, bool(pictures))
    requests = [seeded(request, params, i) for i in range(count)]
    constraints = await service.constraints(constraint, count)
    exchange = ChatExchange(service, call, request_id, requests, constraints, tools)
    return exchange.stream if call.stream else exchange.whole


def constraint_for(wanted: ResponseFormat | None, tools: ToolUse) -> MakeConstraint | None:
    """How answers are held to their form, if they are."""
    kind = "text" if wanted is None else wanted.type
    if tools.on:
        if kind != "text":
            raise bad("response_format", f"response_format {kind} and tools cannot be combined")
        return tools.constraint
    if kind == "json_object":
        return lambda grammars: grammars.json_object()
    if kind == "json_schema":
        assert wanted is not None and wanted.json_schema is not None
        schema = wanted.json_schema.schema_
        if schema is None:
            return lambda grammars: grammars.json_object()
        return lambda grammars: grammars.json_schema(schema, "response_format")
    return None


@dataclass
class Choice:
    """One answer while it comes: what of it can be shown, and what it was in the end."""

    index: int
    eos: frozenset[int]
    writer: LogprobWriter | None
    tools: ToolParser | None
    text: list[str] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    generation: Generation | None = None
    _unsent: list[TokenLogprobs] = field(default_factory=list)

    def push(self, news: Sequence[Delta]) -> tuple[str, list[ToolCall], list[dict[str, Any]]]:
        """(text, calls, logprobs) that may go out now. Logprobs travel with the text they made."""
        text = "".join(delta.text for delta in news)
        self.generation = news[-1].generation if news else None
        calls: list[ToolCall] = []
        if self.tools is not None:
            text, calls = self.tools.push(text)
            if self.generation is not None:
                text += self.tools.flush()
        entries: list[dict[str, Any]] = []
        if self.writer is not None:
            self._unsent += reported(news, self.eos)
            if text or calls or self.generation is not None:
                entries = [self.writer.entry(each) for each in self._unsent]
                self._unsent = []
        self.text.append(text)
        self.entries += entries
        return text, calls, entries

    @property
    def calls(self) -> list[ToolCall]:
        """Every call so far."""
        return [] if self.tools is None else self.tools.calls

    @property
    def finish_reason(self) -> str:
        """Of a finished answer."""
        assert self.generation is not None
        stopped = self.generation.finish_reason == "stop"
        return "tool_calls" if self.calls and stopped else self.generation.finish_reason

    def document(self) -> dict[str, Any]:
        """An element of `choices`."""
        text = "".join(self.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.calls:
            message["content"] = text or None
            message["tool_calls"] = [call_document(call) for call in self.calls]
        return {
            "index": self.index,
            "message": message,
            "logprobs": None if self.writer is None else {"content": self.entries, "refusal": None},
            "finish_reason": self.finish_reason,
        }


def call_document(call: ToolCall) -> dict[str, Any]:
    """An element of `tool_calls`."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


@dataclass
class ChatExchange:
    """Requests that are ready to be submitted, and the documents of their answers."""

    service: Service
    call: ChatRequest
    id: str
    requests: Sequence[Request]
    constraints: Sequence[GrammarConstraint | None]
    tools: ToolUse
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, out: Outgoing) -> None:
        """One document."""
        choices = self._choices()
        async with self.service.asked(self.requests, self.constraints) as deltas:
            async for i, news in deltas(None, None):
                choices[i].push(news)
        document = self._frame("chat.completion", [choice.document() for choice in choices])
        await out.json({**document, **self._figures(choices)})

    async def stream(self, out: Outgoing) -> None:
        """Role, deltas, one finish_reason for each choice, usage if asked for, [DONE]."""
        choices = self._choices()
        async with self.service.asked(self.requests, self.constraints) as deltas:
            async for i, news in deltas(FIRST_TICK, TICK):
                if not out.started:
                    await self._open(out)
                if i < 0:
                    await out.ping()
                else:
                    await self._send(out, choices[i], news)
        if self.call.wants_usage:
            await out.data({**self._frame("chat.completion.chunk", []), **self._figures(choices)})
        await out.end(DONE)

    def _choices(self) -> list[Choice]:
        service, writer = self.service, None
        if self.call.logprobs:
            writer = LogprobWriter(service.engine.tokenizer, service.token_bytes)
        return [
            Choice(
                i, service.eos, writer, ToolParser(self.tools.parallel) if self.tools.on else None
            )
            for i in range(len(self.requests))
        ]

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.name,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
        }

    def _figures(self, choices: Sequence[Choice]) -> dict[str, Any]:
        generations = [choice.generation for choice in choices]
        assert all(g is not None for g in generations)
        done = [g for g in generations if g is not None]
        return {"usage": usage_of(done), "timings": done[0].timings}

    async def _open(self, out: Outgoing) -> None:
        await out.open_stream()
        for i in range(len(self.requests)):
            await self._chunk(out, i, {"role": "assistant", "content": "", "refusal": None})

    async def _send(self, out: Outgoing, choice: Choice, news: Sequence[Delta]) -> None:
        before = len(choice.calls)
        text, calls, entries = choice.push(news)
        if text or entries:
            await self._chunk(out, choice.index, {"content": text}, entries)
        for number, call in enumerate(calls, before):
            delta = {"tool_calls": [{"index": number, **call_document(call)}]}
            await self._chunk(out, choice.index, delta)
        if choice.generation is not None:
            await self._chunk(
                out,
                choice.index,
                {},
                finish=choice.finish_reason,
                timings=choice.generation.timings,
            )

    async def _chunk(
        self,
        out: Outgoing,
        index: int,
        delta: dict[str, Any],
        entries: Sequence[dict[str, Any]] = (),
        finish: str | None = None,
        **more: Any,
    ) -> None:
        logprobs = {"content": list(entries), "refusal": None} if entries else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        frame = self._frame("chat.completion.chunk", [choice])
        if self.call.wants_usage:
            frame["usage"] = None
        await out.data({**frame, **more})
