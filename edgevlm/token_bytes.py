"""The bytes of each token: what a grammar walks over, and what logprobs report.

Read from tokenizer.json's own words: byte-level alphabets (GPT-2, Qwen, Llama 3) and SentencePiece
pieces (`▁`, `<0x0A>`). Knows no text and no grammar.
"""

import functools
from collections.abc import Callable

from edgevlm.errors import BundleError
from edgevlm.tokenizer import Tokenizer

SPACE = "\u2581"


class TokenBytes:
    """`bytes_of[id]` for every id; control tokens as they are written, unknown ids as b""."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises BundleError where the tokenizer's decoder is of an unknown kind."""
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens
        self._of = _reader(tokenizer.decoder_kinds)

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __getitem__(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        word = self._tokenizer.id_to_token(token)
        return b"" if word is None else self._of(word)

    def all(self) -> list[bytes]:
        """Of every id, in order."""
        return [self[i] for i in range(len(self))]


def _reader(kinds: list[str]) -> Callable[[str], bytes]:
    if "ByteLevel" in kinds:
        return _byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds or not kinds:
        return _sentencepiece
    raise BundleError(
        f"tokenizer.json has a decoder of kind {', '.join(kinds)}; token bytes are known for "
        "ByteLevel and SentencePiece alone"
    )


@functools.cache
def _alphabet() -> dict[str, int]:
    """GPT-2's `bytes_to_unicode`, turned round: printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in printable]
    return table | {chr(256 + i): b for i, b in enumerate(others)}


def _byte_level(word: str) -> bytes:
    alphabet = _alphabet()
    try:
        return bytes(alphabet[c] for c in word)
    except KeyError:  # a word that was added by hand
        return word.encode()


def _sentencepiece(word: str) -> bytes:
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes([int(word[3:5], 16)])
    return word.replace(SPACE, " ").encode()
