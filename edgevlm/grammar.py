"""Structured output: JSON schemas and tool calls as constraints on tokens, by llguidance.

Compiling is bounded by the size of what is compiled and by the library's fuel, walking by fuel per
token. A constraint belongs to one answer.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import llguidance
import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import BadParameter
from edgevlm.token_bytes import TokenBytes
from edgevlm.tokenizer import Tokenizer

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]

MAX_SCHEMA_BYTES = 32 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_LEXER_STATES = 16384
STATE_BYTES = 2048  # the library says 1 to 2 kB per state
COMPILED_BYTES = 2 << 20  # of one grammar before it is walked: at most 1 MiB measured
TRIE_BYTES = 256  # per token: 160 measured for 152,000 tokens, 216 for 49,000
# As json.dumps writes it: models have seen that most, and no run of spaces can last for ever.
STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TOOL_BEGIN, TOOL_END = "<tool_call>\n", "\n</tool_call>"


def grammar_bytes(vocab_size: int, running: int, waiting: int) -> int:
    """Most that a model's tables take, and those of its constrained answers, all of them so."""
    walked = running * MAX_LEXER_STATES * STATE_BYTES
    return vocab_size * TRIE_BYTES + walked + (running + waiting) * COMPILED_BYTES


class Grammars:
    """Compiles constraints for one tokenizer. Thread-safe; compiling lets go of the GIL."""

    def __init__(self, tokenizer: Tokenizer, token_bytes: TokenBytes, eos: Sequence[int]) -> None:
        """Takes its tables here: some hundred ms for a large vocabulary."""
        self.vocab_size = tokenizer.vocab_size
        known = [token for token in eos if 0 <= token < self.vocab_size]
        words = _Words(tokenizer, token_bytes.all(), known)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(words), eos_token=known or None
        )
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=1_000_000,  # about 20 ms
            step_lexer_fuel=200_000,  # about 15 ms, in the scheduler's turn
            step_max_items=20_000,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=100_000,
            verbose_errors=False,
        )

    def json_object(self) -> "GrammarConstraint":
        """Any JSON object."""
        return self.json_schema({"type": "object"}, "response_format")

    def json_schema(self, schema: Mapping[str, Any], where: str) -> "GrammarConstraint":
        """JSON that obeys `schema`. Raises BadParameter, which begins with `where`."""
        return self._compiled(_json_grammar(schema, where), where)

    def tool_call(self, tools: Tools, where: str) -> "GrammarConstraint":
        """One call of one of `tools` (name -> schema of its arguments), and nothing else."""
        start = f"start: {_quoted(TOOL_BEGIN)} call {_quoted(TOOL_END)}\n"
        return self._compiled(start + _call_rules(tools, where), where)

    def text_and_tool_calls(
        self, tools: Tools, where: str, parallel: bool = True
    ) -> "GrammarConstraint":
        """Any text; what begins like a tool call is one. Not `parallel`: the first ends it."""
        begin, rest = TOOL_BEGIN.rstrip("\n"), "\n"
        lark = (
            f"start: {'tool* TEXT' if parallel else 'tool | TEXT'}\n"
            f"tool: begin {_quoted(rest)} call {_quoted(TOOL_END)}\n"
            f"begin[lazy]: TEXT {_quoted(begin)}\n"
            "TEXT: /(.|\\n)*/\n"
        )
        return self._compiled(lark + _call_rules(tools, where), where)

    def _compiled(self, grammar: str, where: str) -> "GrammarConstraint":
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise BadParameter(f"{where} cannot be compiled: {_brief(matcher.get_error())}")
        return GrammarConstraint(matcher, self.vocab_size, where)


class GrammarConstraint:
    """A walk through a grammar, one answer's tokens long (`sampling.Constraint`)."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, where: str) -> None:
        self._matcher, self._where = matcher, where
        self._bits = np.zeros(-(-vocab_size // 32), np.int32)

    def mask(self, logits: NDArray[np.float32]) -> None:
        """-inf for each token [vocab] that the grammar forbids here."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        count = min(len(logits), len(allowed))
        logits[:count][allowed[:count] == 0] = -np.inf
        logits[count:] = -np.inf

    def accept(self, token: int) -> bool:
        """Whether the text is complete with this token."""
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadParameter(
                f"{self._where} is too complex to follow: {_brief(self._matcher.get_error())}"
            )


class _Words:
    """A tokenizer as llguidance wants one."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, words: list[bytes], eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = words
        self.eos_token_id = eos[0] if eos else 0
        self.special_token_ids: Collection[int] = sorted(tokenizer.control_tokens.values())

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text)


def _json_grammar(schema: Mapping[str, Any], where: str) -> str:
    text = _checked(schema, where)
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=STYLE)


def _call_rules(tools: Tools, where: str) -> str:
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    size = 0
    for i, (name, schema) in enumerate(tools.items()):
        text = _checked({**schema, "x-guidance": STYLE}, where)
        size += len(text)
        head = _quoted(f'{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f'call_{i}: {head} %json {text} "}}"')
    if size > MAX_SCHEMA_BYTES:
        raise BadParameter(f"{where} has {size:,} bytes of schemas; at most {MAX_SCHEMA_BYTES:,}")
    return "\n".join(rules) + "\n"


def _checked(schema: Mapping[str, Any], where: str) -> str:
    """The schema as JSON text, small enough to be compiled."""
    if (depth := _depth(schema)) > MAX_SCHEMA_DEPTH:
        raise BadParameter(f"{where} is nested {depth} deep or more; at most {MAX_SCHEMA_DEPTH}")
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise BadParameter(
            f"{where} has {len(text):,} bytes; at most {MAX_SCHEMA_BYTES:,} are compiled"
        )
    return text


def _depth(value: Any, limit: int = MAX_SCHEMA_DEPTH + 1) -> int:
    inner = value.values() if isinstance(value, Mapping) else value
    if not isinstance(inner, Iterable) or isinstance(inner, str) or limit == 0:
        return 0
    return 1 + max((_depth(each, limit - 1) for each in inner), default=0)


def _quoted(text: str) -> str:
    """As a string of llguidance's Lark, which are JSON's."""
    return json.dumps(text, ensure_ascii=False)


def _brief(error: str) -> str:
    """Its first line: the rest is the grammar itself."""
    return error.strip().partition("\n")[0][:300] or "unknown reason"
