"""What a model has done since it was opened, counted by its scheduler. Knows no request."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

Outcome = Literal["stop", "length", "cancelled", "deadline", "refused", "error"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "cancelled", "deadline", "refused", "error")
Latency = Literal["queue", "first_token", "inter_token"]
Observer = Callable[[Latency, float], None]  # name, seconds


@dataclass(frozen=True)
class Stats:
    """A snapshot. `requests` counts by outcome; `refused` are those that found the queue full.

    `pools`: (name, bytes, bytes in use) of each pool of the plan; None: not counted.
    Seconds are the scheduler's clock around its pieces of work.
    """

    slots: int
    slots_busy: int
    queued: int
    max_queue: int
    requests: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    image_tokens: int
    images: int
    vision_cache_hits: int
    vision_cache_misses: int
    vision_seconds: float
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    allocations_after_start: int
    pools: tuple[tuple[str, int, int | None], ...]


@dataclass
class Counts:
    """The sums behind a snapshot; written by one thread only."""

    requests: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0
    images: int = 0
    vision_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0

    def sums(self) -> dict[str, int | float]:
        """Everything but `requests`, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "requests"}
