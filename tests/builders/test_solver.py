"""The solver: what it gives fits, one step more does not; what cannot fit is told how it could."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.devices import find_device, planning_target
from builders.limits import BuildOptions, budget_of, check_budget, make_plan, wishes_of
from builders.presets import PRESETS, find_model
from builders.solver import SEQ_STEP, TEXT_ROOM, largest, single_changes
from edgevlm.errors import BuildError, OverBudget

MIB = 1 << 20
TARGETS = {name: planning_target(find_device(name, Path("/"))) for name in ("8GiB", "this-machine")}


def planned(name: str, device: str = "8GiB", **options):
    model = find_model(name)
    asked = BuildOptions(**options)
    target = TARGETS[device]
    return make_plan(
        model.config, asked, target, target.lowerings[0], budget_of(asked), model.tokenizer_bytes
    )


@given(st.integers(0, 500), st.integers(0, 5000), st.integers(1, 300), st.integers(-1, 6000))
def test_largest_is_the_largest_step(low: int, more: int, step: int, bound: int) -> None:
    high = low + more
    steps = [low, *range((low // step + 1) * step, high, step), high]
    expected = max((value for value in steps if value <= bound), default=None)
    assert largest(low, high, step, lambda value: value <= bound) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([n for n in PRESETS]),
    st.sampled_from(sorted(TARGETS)),
    st.integers(600, 12_000),
    st.integers(1, 6),
    st.sampled_from([None, 512, 2048]),
)
def test_the_answer_fits_and_is_maximal(
    name: str, device: str, budget_mib: int, slots: int, max_seq_len: int | None
) -> None:
    budget = budget_mib * MIB
    made = planned(name, device, memory_budget=budget, slots=slots, max_seq_len=max_seq_len)
    limits, wishes = made.plan.limits, made.wishes
    assert limits.slots == slots
    if not made.plan.fits:
        # Then not even the least that is useful fits.
        assert made.size(wishes.least()) > budget
        return
    assert made.plan.total_bytes <= budget
    more = wishes.limits(limits.max_seq_len + SEQ_STEP, limits.max_pixels)
    if wishes.seq_len is not None and more.max_seq_len <= wishes.seq_len.high:
        assert made.size(more) > budget
    if wishes.pixels is not None:
        pixels = (limits.max_pixels // wishes.pixel_step + 1) * wishes.pixel_step
        too_many = pixels > wishes.pixels.high
        no_room = wishes.image_tokens(pixels) + TEXT_ROOM > limits.max_seq_len
        over = made.size(wishes.limits(limits.max_seq_len, pixels)) > budget
        # Below the usual size the shortest context came first, and then it grew.
        lowered = limits.max_pixels < wishes.start.max_pixels
        assert too_many or no_room or over or lowered
        if lowered:
            assert made.size(wishes.limits(wishes.shortest(pixels), pixels)) > budget


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["qwen2-vl-2b", "qwen2.5-vl-7b"]), st.integers(2000, 9000), st.integers(1, 4000)
)
def test_more_memory_never_gives_less(name: str, budget_mib: int, more_mib: int) -> None:
    less, more = (
        planned(name, memory_budget=b * MIB, max_pixels=1280 * 784).plan
        for b in (budget_mib, budget_mib + more_mib)
    )
    assert less.limits.max_seq_len <= more.limits.max_seq_len


def test_what_was_given_outright_stays() -> None:
    made = planned(
        "qwen2-vl-2b", memory_budget=4 << 30, max_seq_len=3000, max_pixels=640 * 480, slots=2
    )
    assert (made.plan.limits.max_seq_len, made.plan.limits.max_pixels) == (3000, 640 * 480)


def test_pixels_are_lowered_only_when_no_context_fits_beside_the_usual_ones() -> None:
    plain = planned("qwen2-vl-2b", max_seq_len=1408, max_pixels=1280 * 784).plan.total_bytes
    enough = planned("qwen2-vl-2b", memory_budget=plain).plan
    assert enough.limits.max_pixels >= 1280 * 784
    short = planned("qwen2-vl-2b", memory_budget=plain - 8 * MIB).plan
    assert short.fits and short.limits.max_pixels < 1280 * 784


def test_floors_are_kept_or_refused() -> None:
    made = planned("qwen2-vl-7b", memory_budget=6 << 30, min_seq_len=9000)
    assert made.plan.fits and made.plan.limits.max_seq_len >= 9000
    over = planned("qwen2-vl-7b", memory_budget=6 << 30, min_seq_len=32768)
    assert over.plan.fits is False
    with pytest.raises(OverBudget, match=r"it would fit with --max-seq-len \d+ instead of 32768"):
        check_budget(over.plan, over.changes)


def test_a_reserve_is_taken_off_the_budget() -> None:
    whole, less = (
        planned("qwen2-vl-7b", memory_budget=b << 30, reserve=r << 30).plan
        for b, r in ((6, 0), (8, 2))
    )
    assert whole.limits == less.limits and less.budget_bytes == 6 << 30
    with pytest.raises(BuildError, match="--reserve"):
        budget_of(BuildOptions(reserve=1))


def test_every_suggestion_fits_and_a_step_less_does_not() -> None:
    made = planned("qwen2-vl-7b", memory_budget=6 << 30, max_seq_len=8192, slots=4, weights="int4")
    assert made.plan.fits is False
    flags = {change.flag: change for change in made.changes}
    assert set(flags) == {"--max-seq-len", "--slots", "a smaller model:"}
    for field in ("max_seq_len", "slots"):
        change = flags[f"--{field.replace('_', '-')}"]
        step = SEQ_STEP if field == "max_seq_len" else 1
        for value, fits in ((change.value, True), (change.value + step, False)):
            size = made.size(dataclasses.replace(made.plan.limits, **{field: value}))
            assert (size <= 6 << 30) is fits
    assert flags["a smaller model:"].value == "qwen2-vl-2b"


def test_where_no_single_change_is_enough_it_says_so() -> None:
    made = planned("qwen2-vl-2b", memory_budget=1 << 30)
    assert made.plan.fits is False and not made.changes
    with pytest.raises(OverBudget, match="no single change is enough"):
        check_budget(made.plan, made.changes)


def test_other_changes_are_the_first_of_their_kind_that_fit() -> None:
    limits = planned("qwen2.5-0.5b").plan.limits
    others = [("m", str(n), "", lambda _, n=n: n) for n in (30, 20, 10)]
    found = single_changes(limits, lambda _: 99, 25, smallest=limits, pixel_step=1, others=others)
    assert [(c.flag, c.value) for c in found] == [("m", "20")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_seq_len": 8}, "--max-seq-len is 8; this model takes from 16 to 32,768"),
        ({"min_seq_len": 40000}, "--min-seq-len is 40,000"),
        ({"min_seq_len": 900, "max_seq_len": 800}, "swap them"),
        ({"min_pixels": 90_000, "max_pixels": 80_000}, "swap them"),
        ({"min_pixels": 12}, "--min-pixels is 12; this model takes from 3,136"),
        ({"slots": 0}, "--slots is 0"),
    ],
)
def test_impossible_wishes_are_refused(options, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        wishes_of(find_model("qwen2-vl-2b").config, BuildOptions(**options))


def test_a_text_model_has_no_pixels_to_ask_for() -> None:
    with pytest.raises(BuildError, match="--min-pixels"):
        wishes_of(find_model("qwen2.5-7b").config, BuildOptions(min_pixels=5000))
