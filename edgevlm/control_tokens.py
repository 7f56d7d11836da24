"""Control tokens (`<|im_end|>`, ...) stand in a prompt only where the chat template writes them.

Where a user's string contains a control token, or could become a part of one next to its
neighbours, an unguessable break mark goes into it before rendering. The marks show in the rendered
text which control tokens were forged, and those are encoded as plain text. Ordinary strings get no
mark, so nothing changes for them; a template may trim, split or join: marks stand only next to
characters of control tokens.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from edgevlm.tokenizer import Tokenizer

# What templates compare with; a mark would make `role == "user"` false where `<|user|>` is a
# control token.
_CONSTANTS = frozenset({"system", "user", "assistant", "tool", "text", "image", "function"})


class ControlTokens:
    """Finds control tokens in strings that come from outside, and marks them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = [t for t in tokenizer.control_tokens if t]
        self._tokenizer = tokenizer
        self._ids = frozenset(tokenizer.control_tokens.values())
        self._pattern = tokenizer.control_pattern
        self._beginnings = {t[:n] for t in tokens for n in range(1, len(t))}
        self._ends = {t[n:] for t in tokens for n in range(1, len(t))}
        self._longest = max(map(len, tokens), default=0)
        self._joined = "\0".join(tokens)

    def mark(self, value: Any, mark: str) -> Any:
        """JSON-like `value` with `mark` in each control token that its strings contain or touch."""
        if isinstance(value, str):
            return value if value in _CONSTANTS else self._mark_text(value, mark)
        if isinstance(value, Mapping):
            # The names of fields are identifiers; other keys come from a user's tool arguments.
            return {
                k if k.isidentifier() else self._mark_text(k, mark): self.mark(v, mark)
                for k, v in value.items()
            }
        return [self.mark(v, mark) for v in value] if isinstance(value, list | tuple) else value

    def _mark_text(self, text: str, mark: str) -> str:
        cuts = {match.start() + 1 for match in _overlapping(self._pattern, text)}
        # Neighbouring strings, or the template's own text, may supply the rest of a token.
        inside = bool(text) and "\0" not in text and text in self._joined
        lengths = range(1, min(len(text), self._longest) + 1)
        if inside or any(text[:n] in self._ends for n in lengths):
            cuts.add(0)
        if inside or any(text[-n:] in self._beginnings for n in lengths):
            cuts.add(len(text))
        edges = [0, *sorted(cuts), len(text)]
        return (
            mark.join(text[a:b] for a, b in zip(edges, edges[1:], strict=False)) if cuts else text
        )

    def encode(self, rendered: str, mark: str) -> list[int]:
        """Ids of a rendered text: in one pass, or around our control tokens if some are forged."""
        text, breaks = _without(rendered, mark)
        ours, forged, place = [], False, 0
        while match := self._pattern.search(text, place):
            if any(at in breaks for at in range(match.start() + 1, match.end())):
                forged, place = True, match.start() + 1
            else:
                ours.append(match)
                place = match.end()
        wanted = [self._tokenizer.control_tokens[match.group()] for match in ours]
        if not forged:
            ids = self._tokenizer.encode(text, special=True)
            # They differ when a normaliser makes a control token out of other characters.
            if [i for i in ids if i in self._ids] == wanted:
                return ids
        ids, start = [], 0
        for match, token in zip(ours, wanted, strict=True):
            ids += [*self._tokenizer.encode(text[start : match.start()]), token]
            start = match.end()
        return ids + self._tokenizer.encode(text[start:])


def unguessable_mark(values: Any) -> str:
    """Six private-use characters (no case, no space, no meaning) that `values` do not contain."""
    known = json.dumps(values, ensure_ascii=False, default=str)
    while True:
        mark = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(6))
        if mark not in known:
            return mark


def _overlapping(pattern: re.Pattern[str], text: str) -> Iterable[re.Match[str]]:
    place = 0
    while match := pattern.search(text, place):
        yield match
        place = match.start() + 1


def _without(rendered: str, mark: str) -> tuple[str, set[int]]:
    """The text without marks, and where they stood."""
    pieces = rendered.split(mark)
    breaks, place = set(), 0
    for piece in pieces[:-1]:
        place += len(piece)
        breaks.add(place)
    return "".join(pieces), breaks
