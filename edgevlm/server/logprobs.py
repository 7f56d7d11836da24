"""Log-probabilities in OpenAI's shapes, with the exact bytes of each token."""

from collections.abc import Sequence
from typing import Any

from edgevlm.generation import Delta
from edgevlm.sampling import TokenLogprobs
from edgevlm.token_bytes import TokenBytes
from edgevlm.tokenizer import Tokenizer


class LogprobWriter:
    """Knows how tokens are spelled."""

    def __init__(self, tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
        self._tokenizer, self._bytes = tokenizer, token_bytes

    def entry(self, of: TokenLogprobs) -> dict[str, Any]:
        """One element of `logprobs.content`."""
        top = [self._token(token, logprob) for token, logprob in of.top]
        return {**self._token(of.id, of.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(self._bytes[token])}

    def legacy(self, entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """The `logprobs` of /v1/completions; `offset`: characters of text before them."""
        tokens = [self._tokenizer.token_text(e.id) for e in entries]
        offsets = []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        top = [{self._tokenizer.token_text(i): p for i, p in e.top} for e in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [e.logprob for e in entries],
            "top_logprobs": top,
            "text_offset": offsets,
        }


def reported(news: Sequence[Delta], eos: frozenset[int]) -> list[TokenLogprobs]:
    """The entries of these deltas; a control token that ends the answer is none of it."""
    found: list[TokenLogprobs] = []
    for delta in news:
        ends = delta.finish_reason == "stop" and delta.token_ids[-1:] and delta.token_ids[-1] in eos
        entries = delta.logprobs or []
        found += entries[:-1] if ends else entries
    return found
