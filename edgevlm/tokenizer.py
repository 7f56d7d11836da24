"""Text to ids and back, through tokenizer.json; streaming text and stop strings.

Knows which strings are control tokens, so that a user's text never becomes one; knows nothing about
templates.
"""

import json
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from edgevlm.errors import BundleError

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 bytes (each shown as U+FFFD) wait for the rest of
# theirs.
_MAX_PENDING = 3
_WINDOW_TOKENS = 8
_CONTEXT_TOKENS = 4


class Tokenizer:
    """A `tokenizers.Tokenizer` whose control tokens come only from where we put them.

    Control tokens are the added tokens marked special, and `protected_ids` (such as image tokens)
    however marked.
    """

    def __init__(self, inner: tokenizers.Tokenizer, protected_ids: Iterable[int] = ()) -> None:
        self._inner = inner
        self._lock = threading.Lock()  # `encode_special_tokens` is a switch on the shared object
        inner.no_truncation()
        inner.no_padding()
        protected = set(protected_ids)
        added = inner.get_added_tokens_decoder()
        control = {i: t for i, t in added.items() if t.special or i in protected}
        self.control_tokens: dict[str, int] = {t.content: i for i, t in control.items()}
        self.added_tokens: dict[int, str] = {i: t.content for i, t in added.items()}
        self.control_pattern = _any_of(self.control_tokens)
        self._not_special = _any_of([t.content for t in control.values() if not t.special])
        # Not `max(get_vocab().values())`: that builds a dict of 150,000 strings. Only added ids
        # leave gaps.
        self.vocab_size: int = max(inner.get_vocab_size(), *(i + 1 for i in added), 0)

    @classmethod
    def from_file(cls, path: str | Path, protected_ids: Iterable[int] = ()) -> "Tokenizer":
        """Read tokenizer.json. Raises BundleError when it is missing or damaged."""
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BundleError(f"{path} is not a tokenizer.json: {error}") from None
        return cls(inner, protected_ids)

    def encode(
        self, text: str, special: bool = False, add_special_tokens: bool = False
    ) -> list[int]:
        """Ids of `text`. Control tokens written in it count as such only with `special`.

        `add_special_tokens` lets the tokenizer's post-processor add its own (a base model's BOS).
        """
        pieces = [text] if special else self._cut_inside_protected(text)
        ids: list[int] = []
        with self._lock:
            self._inner.encode_special_tokens = not special
            for i, piece in enumerate(pieces):
                add = add_special_tokens and i == 0
                ids += self._inner.encode(piece, add_special_tokens=add).ids
        return ids

    def _cut_inside_protected(self, text: str) -> list[str]:
        """Added tokens not marked special are always recognised, unless cut in two."""
        pieces, start = [], 0
        for match in self._not_special.finditer(text):
            cut = match.start() + 1
            pieces.append(text[start:cut])
            start = cut
        return [*pieces, text[start:]]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without control tokens; ids unknown to the tokenizer give nothing."""
        return self._inner.decode(
            [i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True
        )

    def token_to_id(self, token: str) -> int | None:
        """The id of one token, or None."""
        return self._inner.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """One token as its vocabulary writes it (bytes as letters, spaces as marks), or None."""
        return self._inner.id_to_token(token_id)

    @property
    def decoder_kinds(self) -> list[str]:
        """What turns such words into text: `type` of each part of the decoder, outermost first."""
        decoder = self._inner.decoder
        return [] if decoder is None else _kinds(json.loads(decoder.__getstate__()))

    def token_text(self, token_id: int) -> str:
        """One token as text, control tokens too (for logprobs); "" where the id is unknown."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        return self._inner.decode([token_id], skip_special_tokens=False)


def _kinds(decoder: dict[str, Any]) -> list[str]:
    inner = decoder.get("decoders", [])
    return [str(decoder.get("type")), *(kind for each in inner for kind in _kinds(each))]


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the strings, longest first; nothing where there is none."""
    longest_first = sorted((t for t in tokens if t), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class StreamDecoder:
    """Ids in, text deltas out; a character comes when its last byte has come.

    All deltas and `flush` together equal `decode` of all ids. It decodes a window of few tokens
    each time, so a token's cost does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that were already given out

    def push(self, token_id: int) -> str:
        """The text that this token completes, often its own, or ""."""
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        stable = len(text) - _pending(text)
        delta = text[self._emitted : stable]
        self._emitted = max(self._emitted, stable)
        if len(self._window) >= _WINDOW_TOKENS and stable == len(text):
            self._forget()
        elif len(self._window) >= 8 * _WINDOW_TOKENS:
            self._forget()  # a model that writes only broken bytes
        return delta

    def flush(self) -> str:
        """What was held back: at the end of the text an incomplete character shows as U+FFFD."""
        delta = self._tokenizer.decode(self._window)[self._emitted :]
        self._window.clear()
        self._emitted = 0
        return delta

    def _forget(self) -> None:
        """Keep some context: decoders treat a text's first token differently (leading spaces)."""
        self._window = self._window[-_CONTEXT_TOKENS:]
        text = self._tokenizer.decode(self._window)
        self._emitted = len(text) - _pending(text)


def _pending(text: str) -> int:
    """How many characters at the end may still change."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_PENDING)


class StopStrings:
    """Ends a text at the stop string that is complete first; holds back what may become one.

    The result does not depend on how the text was cut into pieces. The stop string itself is not
    given out.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be shown now. After a stop (`stopped`) always ""."""
        if self.stopped or not self._stop:
            return "" if self.stopped else text
        buffer = self._held + text
        found = [(at + len(s), at) for s in self._stop if (at := buffer.find(s)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return buffer[: min(found)[1]]
        keep = max(_overlap(buffer, s) for s in self._stop)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back when the text ended without a stop."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
