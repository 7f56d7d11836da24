"""An answer as the Responses API's items and events, in the official order. Knows no HTTP.

message: output_item.added, content_part.added, output_text.delta..., output_text.done,
content_part.done, output_item.done. call: output_item.added, function_call_arguments.delta, .done,
output_item.done.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from edgevlm.server.tools import ToolCall

Event = tuple[str, dict[str, Any]]  # (type, its fields)


@dataclass
class ItemWriter:
    """Builds `output` and tells what to send meanwhile."""

    output: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, Any] | None = None  # the message that is being written
    _entries: list[dict[str, Any]] = field(default_factory=list)

    def text(self, text: str, entries: list[dict[str, Any]]) -> Iterator[Event]:
        """More of the message."""
        if self._open is None:
            yield from self._begin()
        assert self._open is not None
        self._open["content"][0]["text"] += text
        self._entries += entries
        yield "response.output_text.delta", {**self._at(), "delta": text, "logprobs": entries}

    def call(self, call: ToolCall) -> Iterator[Event]:
        """A whole call; it ends the message before it."""
        yield from self.end_message("completed")
        item = {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        index = len(self.output)
        self.output.append(item)
        yield "response.output_item.added", {"output_index": index, "item": dict(item)}
        at = {"item_id": item["id"], "output_index": index}
        yield "response.function_call_arguments.delta", {**at, "delta": call.arguments}
        done = {**at, "name": call.name, "arguments": call.arguments}
        yield "response.function_call_arguments.done", done
        item |= {"status": "completed", "arguments": call.arguments}
        yield "response.output_item.done", {"output_index": index, "item": dict(item)}

    def finish(self, status: str) -> Iterator[Event]:
        """The end; an answer without a word is an empty message."""
        if not self.output:
            yield from self._begin()
        yield from self.end_message(status)

    def end_message(self, status: str) -> Iterator[Event]:
        """Close the message that is open, if one is."""
        message = self._open
        if message is None:
            return
        part, at = message["content"][0], self._at()
        part["logprobs"] = self._entries
        message["status"] = status
        done = {"text": part["text"], "logprobs": self._entries}
        yield "response.output_text.done", {**at, **done}
        yield "response.content_part.done", {**at, "part": dict(part)}
        index = at["output_index"]
        yield "response.output_item.done", {"output_index": index, "item": dict(message)}
        self._open, self._entries = None, []

    def _begin(self) -> Iterator[Event]:
        item: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        index = len(self.output)
        yield "response.output_item.added", {"output_index": index, "item": {**item, "content": []}}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        self.output.append(item)
        self._open = item
        yield "response.content_part.added", {**self._at(), "part": dict(part)}

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        index = len(self.output) - 1
        return {"item_id": self._open["id"], "output_index": index, "content_index": 0}
