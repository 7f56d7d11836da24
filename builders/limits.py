"""What a person asks for becomes limits and a plan: usual values, checks, and the budget's answer.

`edgevlm plan` and `edgevlm build` both come through here, so that they cannot differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from builders.blocks import WeightPolicy, WeightsName
from builders.planner import plan
from builders.presets import smaller_models
from builders.solver import Change, Range, Size, Wishes, single_changes, solve
from builders.targets import Target
from edgevlm.config import Limits, ModelConfig
from edgevlm.errors import BuildError, OverBudget
from edgevlm.memory_plan import MemoryPlan
from edgevlm.preprocess import max_patches

DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_MAX_PIXELS = 1280 * 28 * 28  # Qwen2-VL's own advice for everyday pictures
DEFAULT_MAX_IMAGES = 4
MIN_SEQ_LEN = 16


@dataclass(frozen=True)
class BuildOptions:
    """What a person decides about a build. None: as the model or the target has it."""

    target: str = "host"
    lowering: Literal["native", "classic"] | None = None
    weights: WeightsName = "int4"
    group_size: int = 128
    max_seq_len: int | None = None
    max_pixels: int | None = None
    max_images: int | None = None
    max_prefill_chunk: int = 256
    slots: int = 1
    memory_budget: int | None = None
    reserve: int = 0
    min_seq_len: int | None = None
    min_pixels: int | None = None
    reference: bool = True
    force: bool = False


@dataclass(frozen=True)
class Planned:
    """A plan, the model with its pictures capped at it, and what would make it fit if it does not.

    `size` gives the total of the same plan with other limits.
    """

    model: ModelConfig
    plan: MemoryPlan
    changes: tuple[Change, ...]
    wishes: Wishes
    size: Size


def budget_of(options: BuildOptions) -> int | None:
    """--memory-budget less --reserve. Raises BuildError."""
    if options.memory_budget is None:
        if options.reserve:
            raise BuildError("--reserve is taken off --memory-budget; give both")
        return None
    return max(0, options.memory_budget - options.reserve)


def make_plan(
    model: ModelConfig,
    options: BuildOptions,
    target: Target,
    lowering: str,
    budget: int | None,
    tokenizer_bytes: int = 0,
) -> Planned:
    """The plan of what was asked; with --memory-budget or a floor, the best that fits.

    Raises BuildError; to be over budget is not an error here.
    """

    def ledger(limits: Limits, of: ModelConfig, weights: WeightsName) -> MemoryPlan:
        policy = WeightPolicy(weights, options.group_size)
        return plan(
            capped(of, limits),
            limits,
            policy,
            target,
            lowering,
            budget_bytes=budget,
            tokenizer_bytes=tokenizer_bytes,
        )

    def sized(of: ModelConfig, weights: WeightsName) -> Size:
        return lambda limits: ledger(limits, of, weights).total_bytes

    size = sized(model, options.weights)
    wishes = wishes_of(model, options)
    limits = wishes.start
    floors = (options.memory_budget, options.min_seq_len, options.min_pixels)
    if budget is not None and any(floor is not None for floor in floors):
        limits = solve(wishes, size, budget) or wishes.least()
    made = ledger(limits, model, options.weights)
    changes: tuple[Change, ...] = ()
    if made.fits is False and budget is not None:
        others = [
            ("a smaller model:", m.name, model.model_type, sized(m.config, options.weights))
            for m in smaller_models(model)
            if _ceiling(m.config) >= limits.max_seq_len
        ]
        if options.weights != "int4":
            others.insert(0, ("--weights", "int4", options.weights, sized(model, "int4")))
        least, step = _smallest(model, limits), wishes.pixel_step
        changes = single_changes(
            limits, size, budget, smallest=least, pixel_step=step, others=others
        )
    return Planned(capped(model, limits), made, changes, wishes, size)


def check_budget(ledger: MemoryPlan, changes: Sequence[Change] = ()) -> None:
    """Raise OverBudget with the figures where the plan needs more than it may."""
    if ledger.fits is not False:
        return
    assert ledger.budget_bytes is not None
    largest = max((p for p in ledger.pools if not p.reclaimable), key=lambda p: p.bytes)
    raise OverBudget(
        f"the plan needs {ledger.total_bytes:,} bytes and the budget is {ledger.budget_bytes:,}: "
        f"{ledger.total_bytes - ledger.budget_bytes:,} too many; the largest part is "
        f"{largest.name} ({largest.bytes:,}); {_advice(changes)}"
    )


def change_text(change: Change) -> str:
    """ "--slots 2 instead of 4 (3,123,456,789 bytes)"."""
    value = f"{change.value:,}" if isinstance(change.value, int) else change.value
    text = f"{change.flag} {value}".replace(",", "")
    if isinstance(change.instead_of, int):
        text += f" instead of {change.instead_of}"
    return f"{text} ({change.total_bytes:,} bytes)"


def _advice(changes: Sequence[Change]) -> str:
    if not changes:
        return "no single change is enough: lower --max-seq-len, --max-pixels and --slots together"
    return "it would fit with " + ", or ".join(change_text(change) for change in changes)


def wishes_of(model: ModelConfig, options: BuildOptions) -> Wishes:
    """What was asked for, checked against what the model can do. Raises BuildError."""
    start, ceiling, processor = _limits(model, options), _ceiling(model), model.image_processor
    seq_len = None
    if options.max_seq_len is None:
        low = options.min_seq_len or min(MIN_SEQ_LEN, ceiling)
        seq_len = Range(low, ceiling)
    if processor is None:
        return Wishes(start, seq_len, None, options.max_prefill_chunk)
    pixels = None
    if options.max_pixels is None:
        pixels = Range(options.min_pixels or processor.min_pixels, processor.max_pixels)
    merge = processor.merge_size

    def image_tokens(cap: int) -> int:
        return max_patches(dataclasses.replace(processor, max_pixels=cap)) // merge**2

    return Wishes(
        start,
        seq_len,
        pixels,
        options.max_prefill_chunk,
        (processor.patch_size * merge) ** 2,
        image_tokens,
    )


def _smallest(model: ModelConfig, limits: Limits) -> Limits:
    """How far each limit can go down for this model."""
    processor = model.image_processor
    return dataclasses.replace(
        limits,
        max_seq_len=MIN_SEQ_LEN,
        max_prefill_chunk=min(32, limits.max_prefill_chunk),
        slots=1,
        max_pixels=processor.min_pixels if processor else 0,
    )


def _ceiling(model: ModelConfig) -> int:
    return model.text.max_position_embeddings


def _limits(model: ModelConfig, options: BuildOptions) -> Limits:
    """The limits asked for, usual values for the rest, each checked."""
    ceiling = _ceiling(model)
    for flag, wanted in (
        ("--max-seq-len", options.max_seq_len),
        ("--min-seq-len", options.min_seq_len),
    ):
        if wanted is not None and not MIN_SEQ_LEN <= wanted <= ceiling:
            raise BuildError(
                f"{flag} is {wanted:,}; this model takes from {MIN_SEQ_LEN} to {ceiling:,}"
            )
    _check_floor("seq-len", options.min_seq_len, options.max_seq_len)
    usual = max(min(DEFAULT_MAX_SEQ_LEN, ceiling), options.min_seq_len or 0)
    max_seq_len = options.max_seq_len or usual
    for flag, value in (
        ("--slots", options.slots),
        ("--max-prefill-chunk", options.max_prefill_chunk),
    ):
        if value < 1:
            raise BuildError(f"{flag} is {value}; it must be at least 1")
    max_images, max_pixels = _image_limits(model, options)
    return Limits(
        max_seq_len=max_seq_len,
        max_prefill_chunk=min(options.max_prefill_chunk, max_seq_len),
        slots=options.slots,
        max_images=max_images,
        max_pixels=max_pixels,
    )


def _image_limits(model: ModelConfig, options: BuildOptions) -> tuple[int, int]:
    processor = model.image_processor
    if processor is None:
        if options.max_images or options.max_pixels or options.min_pixels:
            raise BuildError(
                f"{model.model_type} reads text only; leave --max-images, --max-pixels and "
                "--min-pixels out"
            )
        return 0, 0
    images = DEFAULT_MAX_IMAGES if options.max_images is None else options.max_images
    if images < 1:
        raise BuildError(f"--max-images is {images}; it must be at least 1")
    for flag, wanted in (
        ("--max-pixels", options.max_pixels),
        ("--min-pixels", options.min_pixels),
    ):
        if wanted is not None and not processor.min_pixels <= wanted <= processor.max_pixels:
            raise BuildError(
                f"{flag} is {wanted:,}; this model takes from {processor.min_pixels:,} to "
                f"{processor.max_pixels:,}"
            )
    _check_floor("pixels", options.min_pixels, options.max_pixels)
    usual = max(min(DEFAULT_MAX_PIXELS, processor.max_pixels), options.min_pixels or 0)
    return images, options.max_pixels or usual


def _check_floor(name: str, low: int | None, high: int | None) -> None:
    if low is not None and high is not None and low > high:
        raise BuildError(f"--min-{name} is {low:,} and --max-{name} is {high:,}; swap them")


def capped(model: ModelConfig, limits: Limits) -> ModelConfig:
    """The model with its pictures capped at what was planned."""
    if model.image_processor is None:
        return model
    processor = dataclasses.replace(model.image_processor, max_pixels=limits.max_pixels)
    return dataclasses.replace(model, image_processor=processor)
