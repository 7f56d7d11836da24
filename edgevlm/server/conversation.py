"""Bodies become what the engine takes: messages with places for pictures, and where those are.

Chat messages and the Responses API's items end here in the same form.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from edgevlm.server.pictures import PictureRef
from edgevlm.server.schemas.chat import ChatRequest, Message, NamedTool, TextPart, picture_url
from edgevlm.server.schemas.responses import (
    FunctionCall,
    InputImage,
    MessageItem,
    ResponsesRequest,
)
from edgevlm.server.schemas.responses import NamedTool as FlatNamedTool
from edgevlm.server.tools import ToolSpec, ToolUse, choose, for_template

EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
DETAILS = {"original": "strict"}  # OpenAI's word for: not scaled down


@dataclass
class Conversation:
    """Messages as `VLM.prepare` reads them; `pictures` fill their image parts in order."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[PictureRef] = field(default_factory=list)

    def picture(self, url: str, detail: str | None, where: str) -> dict[str, Any]:
        """Note a picture; the part that stands for it."""
        self.pictures.append(PictureRef(url, where))
        part = {"type": "image"}
        if detail is not None:
            part["detail"] = DETAILS.get(detail, detail)
        return part

    @property
    def characters(self) -> int:
        """Of all text."""
        return sum(map(_characters, self.messages))

    @staticmethod
    def variables(tools: ToolUse) -> dict[str, Any] | None:
        """What the chat template is told besides."""
        return {"tools": [tool.for_template() for tool in tools.tools]} if tools.on else None


def from_chat(call: ChatRequest) -> Conversation:
    """Raises BadParameter."""
    found = Conversation()
    for i, message in enumerate(call.messages):
        found.messages.append(_message(found, message, f"messages[{i}]"))
    return found


def _message(found: Conversation, message: Message, where: str) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, list):
        parts = []
        for i, part in enumerate(content):
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
            else:
                url, detail = picture_url(part)
                parts.append(found.picture(url, detail, f"{where}.content[{i}]"))
        content = parts
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return for_template(plain, where)


def tools_of(call: ChatRequest) -> ToolUse:
    """Raises BadParameter."""
    tools = [
        ToolSpec(t.function.name, t.function.description, t.function.parameters or EMPTY)
        for t in call.tools or ()
    ]
    choice = call.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    plain = None if isinstance(choice, NamedTool) else choice
    return choose(tools, plain, named, call.parallel_tool_calls)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value
    return sum(map(_characters, inner)) if isinstance(inner, Iterable) else 0


def from_items(call: ResponsesRequest) -> Conversation:
    """The Responses API's `instructions` and `input`. Raises BadParameter."""
    found = Conversation()
    if call.instructions is not None:
        found.messages.append({"role": "system", "content": call.instructions})
    if isinstance(call.input, str):
        found.messages.append({"role": "user", "content": call.input})
        return found
    for i, item in enumerate(call.input):
        where = f"input[{i}]"
        if isinstance(item, MessageItem):
            content = _parts(found, item.content, f"{where}.content")
            found.messages.append({"role": item.role, "content": content})
        elif isinstance(item, FunctionCall):
            _add_call(found, item, where)
        else:
            output = _parts(found, item.output, f"{where}.output")
            found.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return found


def _parts(found: Conversation, content: str | list[Any], where: str) -> Any:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        if isinstance(part, InputImage):
            parts.append(found.picture(str(part.image_url), part.detail, f"{where}[{i}]"))
        else:
            parts.append({"type": "text", "text": part.text})
    texts = [part["text"] for part in parts if part["type"] == "text"]
    # Templates expect a string where there are no pictures in an assistant's or a tool's turn.
    return parts if len(texts) < len(parts) else "".join(texts)


def _add_call(found: Conversation, item: FunctionCall, where: str) -> None:
    """Calls of one turn are one message, as chat templates expect them."""
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    message = for_template({"role": "assistant", "content": "", "tool_calls": [call]}, where)
    last = found.messages[-1] if found.messages else {}
    if last.get("role") == "assistant":
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    else:
        found.messages.append(message)


def tools_of_response(call: ResponsesRequest) -> ToolUse:
    """As `tools_of`."""
    tools = [ToolSpec(t.name, t.description, t.parameters or EMPTY) for t in call.tools or ()]
    choice = call.tool_choice
    named = choice.name if isinstance(choice, FlatNamedTool) else None
    plain = None if isinstance(choice, FlatNamedTool) else choice
    return choose(tools, plain, named, call.parallel_tool_calls)
