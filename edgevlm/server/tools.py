"""Tool calls: from a request's `tools` to a prompt and a grammar, from an answer's text to calls.

The form is Qwen's and Hermes': <tool_call>, {"name": ..., "arguments": {...}}, </tool_call>, each
on a line. Knows no HTTP.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgevlm.errors import BadParameter
from edgevlm.grammar import GrammarConstraint, Grammars
from edgevlm.tokenizer import StopStrings

BEGIN, END = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128


@dataclass(frozen=True)
class ToolSpec:
    """A function that may be called. `parameters`: a JSON schema of an object."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


@dataclass(frozen=True)
class ToolUse:
    """What a request wants. `forced`: one of these must be called, and nothing else said."""

    tools: tuple[ToolSpec, ...] = ()
    forced: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def on(self) -> bool:
        """Whether the answer may hold calls."""
        return bool(self.tools)

    def constraint(self, grammars: Grammars) -> GrammarConstraint:
        """Raises BadParameter where a schema cannot be compiled."""
        schemas = {t.name: t.parameters for t in self.tools}
        if self.forced:
            return grammars.tool_call({name: schemas[name] for name in self.forced}, "tools")
        return grammars.text_and_tool_calls(schemas, "tools", self.parallel)


def choose(
    tools: Sequence[ToolSpec], choice: str | None, named: str | None, parallel: bool | None
) -> ToolUse:
    """`choice`: "none", "auto" (the default) or "required"; `named`: the one to call."""
    names = [tool.name for tool in tools]
    if len(tools) > MAX_TOOLS:
        raise BadParameter(f"tools has {len(tools)} functions; at most {MAX_TOOLS}")
    if len(set(names)) != len(names):
        raise BadParameter("tools has two functions of the same name")
    if not tools:
        if named is not None or choice == "required":
            raise BadParameter("tool_choice is given but tools is empty")
        if parallel is not None and parallel is not True:
            raise BadParameter("parallel_tool_calls is given but tools is empty")
        return ToolUse()
    if choice == "none":
        return ToolUse()
    if named is not None and named not in names:
        raise BadParameter(f"tool_choice names {named!r}, which is not among tools")
    forced = (named,) if named is not None else tuple(names) if choice == "required" else ()
    return ToolUse(tuple(tools), forced, parallel is not False)


@dataclass(frozen=True)
class ToolCall:
    """A finished call. `arguments`: JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass
class ToolParser:
    """Text of one answer, piece by piece: what is said, and what is called."""

    parallel: bool = True
    calls: list[ToolCall] = field(default_factory=list)
    _held: str = ""
    _inside: bool = False

    @property
    def full(self) -> bool:
        """One call was made and no second is wanted."""
        return bool(self.calls) and not self.parallel

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """(text to show, calls that are complete now)."""
        shown, calls = "", []
        self._held += text
        while not self.full:
            mark = END if self._inside else BEGIN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._held = after
            if self._inside:
                call = _parsed(before)
                if call is None:
                    shown += BEGIN + before + END
                else:
                    calls.append(call)
                    self.calls.append(call)
            else:
                shown += before
            self._inside = not self._inside
        if not self._inside and not self.full:
            keep = StopStrings((BEGIN,))
            free = keep.push(self._held)
            shown += free
            self._held = self._held[len(free) :]
        return self._between(shown), calls

    def flush(self) -> str:
        """What was held back when the text ended: half a call is text."""
        held = "" if self.full else (BEGIN if self._inside else "") + self._held
        self._held, self._inside = "", False
        return self._between(held)

    def _between(self, text: str) -> str:
        """Line ends between calls are the template's, not the answer's."""
        return text if not self.calls or text.strip() else ""


def _parsed(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call["name"], written)


def for_template(message: dict[str, Any], where: str) -> dict[str, Any]:
    """An assistant's earlier calls with their arguments as objects, as templates expect them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    turned = []
    for i, call in enumerate(calls):
        function = dict(call["function"])
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise BadParameter(
                f"{where}.tool_calls[{i}].function.arguments is not valid JSON"
            ) from None
        turned.append({**call, "function": function})
    return {**message, "tool_calls": turned}
