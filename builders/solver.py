"""Finds the largest limits that fit a budget, or the single changes that would make them fit.

The order: slots, pictures and chunk stay as asked, and so does a limit that was given outright.
Pixels begin at what is usual; only if not even the shortest useful context fits are they lowered.
Then the context grows to its ceiling, then pixels grow. It knows numbers, no model and no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgevlm.config import Limits

SEQ_STEP = 128  # tokens; finer steps would promise more than the formulas know
TEXT_ROOM = 128  # tokens that a question and its answer need beside the largest picture
SHORTEST_USEFUL = 512  # tokens of a context that nobody asked for

Size = Callable[[Limits], int]  # the plan's total bytes


@dataclass(frozen=True)
class Range:
    """From `low` to `high`, both allowed."""

    low: int
    high: int


@dataclass(frozen=True)
class Wishes:
    """`start`: the limits asked for, usual values for the rest. A range None: it is fixed there.

    `prefill_chunk` is what was asked; a shorter context shortens it. `pixel_step` 0: no pictures.
    `image_tokens` gives the tokens of the largest picture under a cap.
    """

    start: Limits
    seq_len: Range | None
    pixels: Range | None
    prefill_chunk: int
    pixel_step: int = 0
    image_tokens: Callable[[int], int] = lambda pixels: 0

    def limits(self, seq_len: int, pixels: int) -> Limits:
        """The limits with these two."""
        chunk = min(self.prefill_chunk, seq_len)
        return dataclasses.replace(
            self.start, max_seq_len=seq_len, max_pixels=pixels, max_prefill_chunk=chunk
        )

    def shortest(self, pixels: int) -> int:
        """The shortest context worth having: the largest picture and a question fit into it."""
        if self.seq_len is None:
            return self.start.max_seq_len
        needed = max(SHORTEST_USEFUL, self.image_tokens(pixels) + TEXT_ROOM)
        return min(max(self.seq_len.low, _up(needed, SEQ_STEP)), self.seq_len.high)

    def least(self) -> Limits:
        """The smallest that would do."""
        pixels = self.start.max_pixels if self.pixels is None else self.pixels.low
        return self.limits(self.shortest(pixels), pixels)


@dataclass(frozen=True)
class Change:
    """One thing to change, and the total it would bring."""

    flag: str
    value: int | str
    instead_of: int | str
    total_bytes: int


def solve(wishes: Wishes, size: Size, budget: int) -> Limits | None:
    """The best limits within the budget; None: not even the smallest fit. `size` is monotone."""

    def fits(seq_len: int, pixels: int) -> bool:
        return size(wishes.limits(seq_len, pixels)) <= budget

    usual = pixels = wishes.start.max_pixels
    if not fits(wishes.shortest(pixels), pixels):
        if wishes.pixels is None:
            return None
        fewer = largest(
            wishes.pixels.low, pixels, wishes.pixel_step, lambda p: fits(wishes.shortest(p), p)
        )
        if fewer is None:
            return None
        pixels = fewer
    seq_len = wishes.shortest(pixels)
    if wishes.seq_len is not None:
        longer = largest(seq_len, wishes.seq_len.high, SEQ_STEP, lambda s: fits(s, pixels))
        seq_len = longer or seq_len
    if wishes.pixels is not None and pixels == usual:

        def usable(more: int) -> bool:
            return wishes.image_tokens(more) + TEXT_ROOM <= seq_len and fits(seq_len, more)

        pixels = largest(pixels, wishes.pixels.high, wishes.pixel_step, usable) or pixels
    return wishes.limits(seq_len, pixels)


def largest(low: int, high: int, step: int, good: Callable[[int], bool]) -> int | None:
    """The largest of `low`, the multiples of `step` above it and `high` that is good.

    `good` turns from true to false once at most; None: `low` is not good.
    """
    if not good(low):
        return None
    if high <= low or good(high):
        return max(low, high)
    yes, no = low // step, -(-high // step)  # in steps; `yes` stands for low
    while no - yes > 1:
        middle = (yes + no) // 2
        if good(middle * step):
            yes = middle
        else:
            no = middle
    return max(low, yes * step)


def single_changes(
    limits: Limits,
    size: Size,
    budget: int,
    *,
    smallest: Limits,
    pixel_step: int,
    others: Sequence[tuple[str, str, str, Size]] = (),
) -> tuple[Change, ...]:
    """What alone would make these limits fit: the least change of each kind that does.

    `smallest`: how far each limit can go down. `others`: (flag, value, instead of, size) of
    changes that are no limit, such as a smaller
    model; of one flag the first that fits.
    """
    found = []
    for flag, field, step in (
        ("--max-pixels", "max_pixels", pixel_step),
        ("--max-seq-len", "max_seq_len", SEQ_STEP),
        ("--slots", "slots", 1),
        ("--max-prefill-chunk", "max_prefill_chunk", 32),
    ):
        low, asked = getattr(smallest, field), getattr(limits, field)
        if low >= asked:
            continue

        def lowered(value: int, field: str = field) -> Limits:
            changed = dataclasses.replace(limits, **{field: value})
            chunk = min(changed.max_prefill_chunk, changed.max_seq_len)
            return dataclasses.replace(changed, max_prefill_chunk=chunk)

        value = largest(low, asked, step, lambda v, to=lowered: size(to(v)) <= budget)  # type: ignore[misc]
        if value is not None and value < asked:
            found.append(Change(flag, value, asked, size(lowered(value))))
    for flag, name, instead_of, other in others:
        total = other(limits)
        if total <= budget and all(flag != change.flag for change in found):
            found.append(Change(flag, name, instead_of, total))
    return tuple(found)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
