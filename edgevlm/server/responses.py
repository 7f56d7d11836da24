"""POST /v1/responses: text and pictures in, items out, whole or as events. Nothing is stored."""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgevlm.generation import Delta, Generation
from edgevlm.grammar import GrammarConstraint
from edgevlm.request import Request
from edgevlm.server.chat import FIRST_TICK, TICK, Choice, constraint_for
from edgevlm.server.conversation import from_items, tools_of_response
from edgevlm.server.errors import ApiError, from_error
from edgevlm.server.intake import ClientGone, Held
from edgevlm.server.logprobs import LogprobWriter
from edgevlm.server.outgoing import Outgoing
from edgevlm.server.response_items import Event, ItemWriter
from edgevlm.server.schemas.base import JSONSchema
from edgevlm.server.schemas.chat import ResponseFormat
from edgevlm.server.schemas.responses import ResponsesRequest, TextFormat
from edgevlm.server.service import Service
from edgevlm.server.tools import ToolParser, ToolUse


async def prepare(
    service: Service, call: ResponsesRequest, request_id: str, held: Held
) -> Callable[[Outgoing], Awaitable[None]]:
    """Everything that can be refused is refused here."""
    service.check_model(call.model)
    params = call.params()
    tools = tools_of_response(call)
    conversation = from_items(call)
    service.check_tools(tools)
    service.check_text(conversation.characters, "input")
    constraint = constraint_for(_format(call), tools)
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
    (walk,) = await service.constraints(constraint, 1)
    exchange = ResponseExchange(service, call, request_id, request, walk, tools)
    return exchange.stream if call.stream else exchange.whole


def _format(call: ResponsesRequest) -> ResponseFormat | None:
    wanted = call.text.format if call.text is not None else None
    if wanted is None:
        return None
    schema = None
    if wanted.type == "json_schema":
        assert wanted.name is not None
        schema = JSONSchema(name=wanted.name, schema=wanted.schema_)
    return ResponseFormat(type=wanted.type, json_schema=schema)


@dataclass
class ResponseExchange:
    """A request that is ready to be submitted, and the documents of its answer."""

    service: Service
    call: ResponsesRequest
    id: str
    request: Request
    constraint: GrammarConstraint | None
    tools: ToolUse
    items: ItemWriter = field(default_factory=ItemWriter)
    created: float = field(default_factory=lambda: float(int(time.time())))

    async def whole(self, out: Outgoing) -> None:
        """One document."""
        choice = self._choice()
        async with self.service.asked([self.request], [self.constraint]) as deltas:
            async for _, news in deltas(None, None):
                for _ in self._events(choice, news):
                    pass
        await out.json(self._finished(choice.generation))

    async def stream(self, out: Outgoing) -> None:
        """Events in the official order, the last one with the whole response."""
        choice = self._choice()
        try:
            async with self.service.asked([self.request], [self.constraint]) as deltas:
                async for i, news in deltas(FIRST_TICK, TICK):
                    if not out.started:
                        await out.open_stream()
                        begun = self._document("in_progress")
                        await out.event("response.created", response=begun)
                        await out.event("response.in_progress", response=begun)
                    if i < 0:
                        await out.ping()
                    for kind, fields in self._events(choice, news):
                        await out.event(kind, **fields)
        except ClientGone:
            raise
        except Exception as error:
            if out.started:
                await self._failed(out, from_error(error))
            raise
        document = self._finished(choice.generation)
        await out.event(f"response.{document['status']}", response=document)
        await out.end()

    def _choice(self) -> Choice:
        service, writer = self.service, None
        if self.call.wants_logprobs:
            writer = LogprobWriter(service.engine.tokenizer, service.token_bytes)
        parser = ToolParser(self.tools.parallel) if self.tools.on else None
        return Choice(0, service.eos, writer, parser)

    def _events(self, choice: Choice, news: Sequence[Delta]) -> Iterator[Event]:
        if not news:
            return
        text, calls, entries = choice.push(news)
        if text or entries:
            yield from self.items.text(text, entries)
        for call in calls:
            yield from self.items.call(call)
        if choice.generation is not None:
            yield from self.items.finish(_status(choice.generation))

    async def _failed(self, out: Outgoing, error: ApiError) -> None:
        failed = {
            **self._document("failed"),
            "error": {"code": "server_error", "message": error.message},
        }
        await out.event("response.failed", response=failed)

    def _finished(self, generation: Generation | None) -> dict[str, Any]:
        assert generation is not None, "an answer ends with its generation"
        document = self._document(_status(generation))
        if document["status"] == "incomplete":
            document["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**document, "usage": _usage(generation), "timings": generation.timings}

    def _document(self, status: str) -> dict[str, Any]:
        call = self.call
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": call.instructions,
            "max_output_tokens": call.max_output_tokens,
            "metadata": call.metadata or {},
            "model": self.service.name,
            "output": [dict(item) for item in self.items.output] if status != "in_progress" else [],
            "parallel_tool_calls": call.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": call.temperature,
            "text": {"format": _format_document(call)},
            "tool_choice": _plain(call.tool_choice) or "auto",
            "tools": [_plain(tool) for tool in call.tools or ()],
            "top_p": call.top_p,
            "top_logprobs": call.top_logprobs,
            "truncation": "disabled",
            "usage": None,
            "user": call.user,
        }


def _status(generation: Generation) -> str:
    return "completed" if generation.finish_reason == "stop" else "incomplete"


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    taken, given = usage["prompt_tokens"], usage["completion_tokens"]
    return {
        "input_tokens": taken,
        "input_tokens_details": {
            "cached_tokens": usage["cached_tokens"],
            "cache_write_tokens": 0,
            "image_tokens": usage["image_tokens"],
        },
        "output_tokens": given,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": taken + given,
    }


def _format_document(call: ResponsesRequest) -> Any:
    wanted: TextFormat | None = call.text.format if call.text is not None else None
    return {"type": "text"} if wanted is None else _plain(wanted)


def _plain(value: Any) -> Any:
    """A part of the request as it came."""
    if value is None or isinstance(value, str):
        return value
    return value.model_dump(by_alias=True, exclude_none=True)
