"""The ledger adds up, and nothing in it overlaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevlm.config import Limits, from_dict, to_dict
from edgevlm.memory_plan import (
    ALIGNMENT,
    MemoryPlan,
    Placement,
    Pool,
    aligned,
    place,
    placed_bytes,
    tensor_bytes,
)

LIMITS = Limits(max_seq_len=64, max_prefill_chunk=16, slots=2)
SHAPES = st.lists(
    st.tuples(
        st.sampled_from(["float32", "float16", "int64", "bool"]),
        st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    ),
    max_size=12,
)


def plan(pools, placements=(), **changes):
    return MemoryPlan(LIMITS, tuple(pools), tuple(placements), **changes)


def test_tensor_bytes_by_hand():
    assert tensor_bytes((3, 5), "float16") == 30
    assert tensor_bytes((2, 7), "int64") == 112
    assert tensor_bytes((9,), "bool") == 9
    assert aligned(1) == ALIGNMENT
    assert aligned(ALIGNMENT) == ALIGNMENT
    assert aligned(0) == 0


@given(SHAPES)
def test_placed_tensors_never_overlap_and_are_aligned(shapes):
    tensors = [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(shapes)]
    placements = place("io", tensors)
    size = placed_bytes(placements)
    plan([Pool("io", size, "")], placements)  # the plan itself refuses an overlap
    assert size == sum(aligned(p.nbytes) for p in placements)
    for before, after in zip(placements, placements[1:], strict=False):
        assert before.offset + before.nbytes <= after.offset
    assert all(p.offset % ALIGNMENT == 0 for p in placements)


def test_rows():
    placement = Placement("x", "io", 0, "float16", (4, 3, 5))
    assert placement.row_bytes == 30
    assert placement.nbytes == 120


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ([("a", 0, (64,)), ("b", 128 * 2 - 256, (64,))], "b overlaps a|a overlaps b"),
        ([("a", 0, (65,)), ("b", 256, (4,))], "b overlaps a"),
        ([("a", 8, (4,))], "a starts at byte 8"),
        ([("a", 256, (65,))], "a ends at byte 516, beyond io"),
        ([("a", 0, (1,)), ("a", 256, (1,))], "two placements"),
    ],
)
def test_a_plan_with_a_wrong_placement_cannot_be_made(placements, words):
    tensors = [Placement(name, "io", at, "float32", shape) for name, at, shape in placements]
    with pytest.raises(ValueError, match=words):
        plan([Pool("io", 512, "")], tensors)


def test_a_placement_needs_its_pool():
    with pytest.raises(ValueError, match="beyond kv_cache"):
        plan([Pool("io", 512, "")], [Placement("k", "kv_cache", 0, "float32", (1,))])


def test_total_leaves_out_what_the_kernel_can_take_back():
    pools = [Pool("io", 100, ""), Pool("embedding_table", 1000, "", reclaimable=True)]
    assert plan(pools).total_bytes == 100
    assert plan(pools).fits is None
    assert plan(pools, budget_bytes=100).fits is True
    assert plan(pools, budget_bytes=99).fits is False


def test_a_plan_survives_json():
    placements = place("io", [("x", "int64", (2, 3)), ("y", "bool", (7,))])
    whole = plan([Pool("io", 512, "by hand", "reported")], placements, budget_bytes=7)
    assert from_dict(MemoryPlan, to_dict(whole)) == whole


def test_unknown_names_are_errors():
    with pytest.raises(KeyError):
        plan([]).pool("io")
    with pytest.raises(KeyError):
        plan([]).placement("x")
