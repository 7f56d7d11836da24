"""One token out of one row of logits: greedy, or temperature, top-k, top-p, min-p, with penalties.

Order and formulas are transformers' (`generation/logits_process.py`), presence and frequency
OpenAI's. Knows nothing about text, slots or executors.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm.config import GenerationDefaults
from edgevlm.errors import BadParameter, ExecutorError

F32 = NDArray[np.float32]

MAX_LOGPROBS = 20
LOWEST_LOGPROB = -9999.0  # JSON has no -inf
_CHUNKS = 512  # top-k and top-p look at the chunks' maxima before they look at the vocabulary


@dataclass(frozen=True)
class SamplingParams:
    """What a request says about sampling; None leaves it to the bundle's defaults.

    | field              | meaning                                                      |
    |--------------------|--------------------------------------------------------------|
    | temperature        | 0: greedy                                                    |
    | top_k              | 0: off                                                       |
    | repetition_penalty | over prompt and output (image tokens never); 1: off          |
    | presence_penalty   | over the output, once per different token; -2 to 2           |
    | frequency_penalty  | over the output, once per occurrence; -2 to 2                |
    | logit_bias         | (token id, what is added to its logit: -100 to 100), ...     |
    | seed               | any integer, taken modulo 2^64; None: different each time    |
    | max_tokens         | None: as many as fit                                         |
    | logprobs           | how many alternatives to report (0-20); None: no logprobs    |
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, None)
        _check_number("top_p", self.top_p, 0, 1, above=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0, None, above=True)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        for token, bias in self.logit_bias:
            _check_int("logit_bias", token, 0, None)
            _check_number(f"logit_bias of token {token}", bias, -100, 100)
        _check_int("top_k", self.top_k, 0, None)
        _check_int("seed", self.seed, None, None)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise BadParameter(f"ignore_eos is {self.ignore_eos!r}, not true or false")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
            raise BadParameter(f"stop is {self.stop!r}, not a list of strings with text in them")
        object.__setattr__(self, "stop", tuple(stop))


def _check_number(
    name: str, value: Any, low: float, high: float | None, above: bool = False
) -> None:
    if value is None:
        return
    limit = f"{'above' if above else 'at least'} {low}" + (f", at most {high}" if high else "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadParameter(f"{name} is {value!r}; it must be a number {limit}")
    low_ok = value > low if above else value >= low
    if not math.isfinite(value) or not low_ok or (high is not None and value > high):
        raise BadParameter(f"{name} is {value!r}; it must be {limit}")


def _check_int(name: str, value: Any, low: int | None, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadParameter(f"{name} is {value!r}; it must be an integer")
    if (low is not None and value < low) or (high is not None and value > high):
        limit = f"at least {low}" + (f", at most {high}" if high is not None else "")
        raise BadParameter(f"{name} is {value}; it must be {limit}")


def resolve(params: SamplingParams, defaults: GenerationDefaults) -> SamplingParams:
    """`params`, its open fields filled from the bundle's defaults, then with neutral values.

    Without a temperature the bundle decides: greedy unless its generation_config has `do_sample`.
    transformers' unwritten default top_k of 50 is not applied.
    """

    def first(*values: Any) -> Any:
        return next(v for v in values if v is not None)

    own_temperature = defaults.temperature if defaults.do_sample else 0.0
    return dataclasses.replace(
        params,
        temperature=first(params.temperature, own_temperature, 1.0),
        top_p=first(params.top_p, defaults.top_p, 1.0),
        top_k=first(params.top_k, defaults.top_k, 0),
        min_p=first(params.min_p, defaults.min_p, 0.0),
        repetition_penalty=first(params.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=first(params.presence_penalty, 0.0),
        frequency_penalty=first(params.frequency_penalty, 0.0),
    )


class TokenLogprobs(NamedTuple):
    """Log-probabilities that the model gave, before penalties and temperature; always finite."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, logprob), best first


class Constraint(Protocol):
    """What an answer's tokens may be, step by step: a grammar, a schema."""

    def mask(self, logits: F32) -> None:
        """Set the logits [vocab] of tokens that may not come next to -inf, in place."""
        ...

    def accept(self, token: int) -> bool:
        """Take note of the token that was chosen; True: the text is complete and must end."""
        ...


class Sampler:
    """Chooses the tokens of one request, remembers them for penalties, owns its random stream."""

    def __init__(
        self,
        params: SamplingParams,
        defaults: GenerationDefaults,
        prompt_ids: Sequence[int] | NDArray[np.int64],
        vocab_size: int,
        image_token: int | None = None,
    ) -> None:
        """`vocab_size` is the tokenizer's: ids beyond it (a padded head) are never chosen."""
        self.params = resolve(params, defaults)
        self._vocab_size = vocab_size
        p = self.params
        self._temperature = float(p.temperature or 0.0)
        self._repetition = float(p.repetition_penalty or 1.0)
        self._presence = float(p.presence_penalty or 0.0)
        self._frequency = float(p.frequency_penalty or 0.0)
        self._penalises = (self._repetition, self._presence, self._frequency) != (1.0, 0.0, 0.0)
        biased = dict(p.logit_bias)
        self._biased = np.array(list(biased), np.int64)
        self._bias = np.array(list(biased.values()), np.float32)
        if len(biased) and int(self._biased.max()) >= vocab_size:
            raise BadParameter(
                f"logit_bias has token {int(self._biased.max())}; this model has {vocab_size:,}, "
                "counted from 0"
            )
        self._image_token = image_token
        self._seen: set[int] = set()
        self._counts: dict[int, int] = {}
        if self._penalises:
            known = np.unique(np.asarray(prompt_ids, np.int64))
            self._seen = {int(i) for i in known if 0 <= i < vocab_size and i != image_token}
        seed = None if p.seed is None else p.seed % 2**64
        self._random = np.random.Generator(np.random.Philox(seed))

    def sample(
        self, logits: NDArray[np.floating[Any]], constraint: Constraint | None = None
    ) -> tuple[int, TokenLogprobs | None]:
        """The next id from logits [>= vocab_size], and its log-probabilities where asked for.

        A constraint masks after the penalties; log-probabilities are those from before it. Raises
        ExecutorError where the logits hold NaN or +inf (such an answer would be token 0 for ever),
        or where a constraint leaves nothing.
        """
        raw: F32 = logits[: self._vocab_size].astype(np.float32, copy=False)
        scores = self._penalised(raw) if self._penalises or len(self._bias) else raw
        best = int(scores.argmax())
        # argmax stops at the first NaN and finds +inf, so its value alone tells about the whole
        # row.
        if not math.isfinite(scores[best]):
            raise ExecutorError(
                f"numeric error: logits are not finite (logits[{best}] = {scores[best]}); "
                "this model needs a wider type than the bundle was built with"
            )
        if constraint is not None:
            scores = raw.copy() if scores is raw else scores
            constraint.mask(scores)
            best = int(scores.argmax())
            if not math.isfinite(scores[best]):
                raise ExecutorError(
                    "the constraint on this answer allows no token at all; loosen its grammar"
                )
        chosen = best if self._temperature == 0 else self._draw(scores, float(scores[best]))
        if self._penalises and chosen != self._image_token:
            self._seen.add(chosen)
            self._counts[chosen] = self._counts.get(chosen, 0) + 1
        count = self.params.logprobs
        return chosen, None if count is None else token_logprobs(raw, chosen, count)

    def _penalised(self, raw: F32) -> F32:
        scores = raw.copy()
        scores[self._biased] += self._bias
        if self._repetition != 1.0 and self._seen:
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            picked = scores[ids]
            scores[ids] = np.where(picked < 0, picked * self._repetition, picked / self._repetition)
        if self._counts:
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(ids))
            scores[ids] -= self._presence + self._frequency * counts
        return scores

    def _draw(self, scores: F32, best: float) -> int:
        p = self.params
        top_k, top_p, min_p = p.top_k or 0, float(p.top_p or 1.0), float(p.min_p or 0.0)
        ids = None if top_k == 0 or top_k >= len(scores) else largest(scores, top_k)
        kept = scores if ids is None else scores[ids]
        weights = self._weights(kept, best)
        if top_p < 1.0:
            picked = _nucleus(weights, top_p)
            ids = picked if ids is None else ids[picked]
            weights = weights[picked]
        if min_p > 0.0:  # the best token's weight is 1
            picked = np.flatnonzero(weights >= min_p)
            ids = picked if ids is None else ids[picked]
            weights = weights[picked]
        place = _weighted(weights, self._random.random())
        return place if ids is None else int(ids[place])

    def _weights(self, scores: F32, best: float) -> F32:
        """exp((score - best) / temperature): probability up to a constant; the best token has 1."""
        with np.errstate(over="ignore", under="ignore"):
            # A subnormal temperature would be 0 in float32, and 0 / 0 is NaN.
            inverse = 1.0 / max(self._temperature, 1e-30)
            weights: F32 = np.subtract(scores, np.float32(best))
            np.multiply(weights, np.float32(inverse), out=weights)
            np.exp(weights, out=weights)
        return weights


def largest(scores: F32, k: int) -> NDArray[np.int64]:
    """Ids, in ascending order, of the k largest scores and of all that equal the k-th."""
    pool = _candidates(scores, k)
    values = scores[pool]
    kth = np.partition(values, len(values) - k)[len(values) - k]
    chosen: NDArray[np.int64] = pool[values >= kth]
    return chosen


def _candidates(scores: F32, k: int) -> NDArray[np.int64]:
    """Ids, ascending, of some scores among which the k largest, with ties, surely are.

    The k-th largest of the chunks' maxima is at most the k-th largest score.
    """
    width = len(scores) // _CHUNKS
    if k > _CHUNKS or width < 2:
        return np.arange(len(scores))
    maxima = scores[: width * _CHUNKS].reshape(_CHUNKS, width).max(axis=1)
    bound = np.partition(maxima, _CHUNKS - k)[_CHUNKS - k]
    return np.flatnonzero(scores >= bound)


def _nucleus(weights: F32, top_p: float) -> NDArray[np.int64]:
    """Places of the fewest largest weights whose share reaches `top_p`; at least one."""
    limit = top_p * float(weights.sum(dtype=np.float64))
    for k in (64, _CHUNKS):
        if k >= len(weights):
            break
        pool = _candidates(weights, k)
        order = pool[np.argsort(-weights[pool], kind="stable")]
        # Beyond the k-th place the pool may lack members, so only a limit reached within k counts.
        reached = np.cumsum(weights[order[:k]], dtype=np.float64) >= limit
        if reached.any():
            return order[: int(reached.argmax()) + 1]
    values = np.sort(weights)[::-1]  # a flat distribution: sorting values costs a third of argsort
    count = int(np.searchsorted(np.cumsum(values, dtype=np.float64), limit)) + 1
    edge = values[min(count, len(values)) - 1]
    above = np.flatnonzero(weights > edge)
    return np.concatenate((above, np.flatnonzero(weights == edge)[: count - len(above)]))


def _weighted(weights: F32, uniform: float) -> int:
    """The place that a uniform number in [0, 1) falls on: first its chunk, then within it."""
    width = max(1, len(weights) // _CHUNKS)
    cumulative = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), width)), dtype=float)
    chunk, rest = _fall(cumulative, uniform * float(cumulative[-1]))
    part = weights[chunk * width : (chunk + 1) * width]
    return chunk * width + _fall(np.cumsum(part, dtype=float), rest)[0]


def _fall(cumulative: NDArray[np.float64], target: float) -> tuple[int, float]:
    """The place whose share holds `target`, never one without a share, and what is left of it."""
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    place = min(int(np.searchsorted(cumulative, target, side="right")), last)
    return place, target - (float(cumulative[place - 1]) if place else 0.0)


def token_logprobs(logits: F32, chosen: int, count: int) -> TokenLogprobs:
    """Log-softmax of `logits` at `chosen` and at the `count` best, at least LOWEST_LOGPROB."""
    best = np.float32(logits.max())
    with np.errstate(under="ignore"):
        total = float(best) + math.log(float(np.exp(logits - best).sum(dtype=np.float64)))
    pool = largest(logits, min(count, len(logits))) if count else np.empty(0, np.int64)
    order = pool[np.argsort(-logits[pool], kind="stable")][:count]

    def finite(i: int) -> float:
        return max(float(logits[i]) - total, LOWEST_LOGPROB)

    return TokenLogprobs(chosen, finite(chosen), tuple((int(i), finite(int(i))) for i in order))
