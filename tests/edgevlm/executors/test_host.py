"""The host executor's promises: fixed memory, checked borders, one clear error, no growth."""

import dataclasses

import numpy as np
import onnxruntime
import pytest

from edgevlm.bundle import Bundle
from edgevlm.errors import ExecutorError
from edgevlm.executors.host import HostExecutor
from edgevlm.memory_plan import Pool
from edgevlm.runner import ModelRunner
from tests.tiny_models import LIMITS, TinyModels, make_prompt, prefill, running

SEALED = hasattr(onnxruntime.InferenceSession, "create_ortvalue_from_shape_and_type")
needs_seal = pytest.mark.skipif(not SEALED, reason="ONNX Runtime before 1.32 cannot seal an arena")
DIMS = {"batch_size": 1, "row": 0, "slot": 0}


def with_arena(bundle: Bundle, nbytes: int) -> Bundle:
    """The bundle as if its activations had been planned at `nbytes`."""
    plan = bundle.manifest.plan
    pools = tuple(
        Pool("activations", nbytes, "a test's") if p.name == "activations" else p
        for p in plan.pools
    )
    plan = dataclasses.replace(plan, pools=pools)
    return dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, plan=plan))


@needs_seal
def test_a_run_beyond_the_arena_is_an_error_and_the_next_one_works(tiny: TinyModels) -> None:
    model = tiny.get("llama")
    short, long = make_prompt(model, "hi"), make_prompt(model, "h" * 60)
    with running(model) as runner:
        expected = prefill(runner, 0, short)
    executor = HostExecutor(with_arena(model.bundle, 128 << 10), threads=1)
    runner = ModelRunner(model.bundle, executor)
    for _ in range(3):
        assert np.array_equal(prefill(runner, 0, short), expected)
        with pytest.raises(ExecutorError, match="prefill"):
            prefill(runner, 0, long)
        assert runner.slots[0].length == 0
    executor.close()


@needs_seal
def test_a_mended_arena_is_the_next_executors_own(tiny: TinyModels) -> None:
    """Each executor has its arena, though ONNX Runtime registers them for the whole process."""
    model = tiny.get("llama")
    small = HostExecutor(with_arena(model.bundle, 64 << 10), threads=1)
    large = HostExecutor(model.bundle, threads=1)
    long = make_prompt(model, "h" * 60)
    with pytest.raises(ExecutorError):
        prefill(ModelRunner(model.bundle, small), 0, long)
    prefill(ModelRunner(model.bundle, large), 0, long)
    small.close()
    prefill(ModelRunner(model.bundle, large), 0, long)
    large.close()


@pytest.mark.parametrize(("start", "rows"), [(-1, 1), (0, 516), (515, 1), (512, 4)])
def test_rows_beyond_the_tensor_are_refused(tiny: TinyModels, start: int, rows: int) -> None:
    executor = HostExecutor(tiny.get("llama").bundle, threads=1)
    width = executor.read("inputs_embeds").shape[1]
    before = executor.read("inputs_embeds").copy()
    with pytest.raises(ValueError, match="inputs_embeds"):
        executor.write("inputs_embeds", np.ones((rows, width), np.float32), start)
    with pytest.raises(ValueError, match="inputs_embeds"):
        executor.staging("inputs_embeds", rows, start)
    assert np.array_equal(executor.read("inputs_embeds"), before)
    executor.close()


@pytest.mark.parametrize(
    "dims",
    [{"sequence_length": 65}, {"sequence_length": 64, "row": 460}, {"batch_size": 3, "slot": 1}],
)
def test_a_run_beyond_its_placements_is_refused(tiny: TinyModels, dims: dict[str, int]) -> None:
    executor = HostExecutor(tiny.get("llama").bundle, threads=1)
    with pytest.raises(ValueError, match="does not fit"):
        executor.run("prefill", **(DIMS | {"sequence_length": 1} | dims))
    executor.run("decode", **DIMS, sequence_length=1)
    executor.close()


def test_a_name_or_phase_that_is_not_there(tiny: TinyModels) -> None:
    executor = HostExecutor(tiny.get("llama").bundle, threads=1)
    with pytest.raises(ValueError, match="no tensor 'pixels'"):
        executor.read("pixels")
    with pytest.raises(ExecutorError, match="no vision graph"):
        executor.run("vision", num_patches=4)
    executor.close()


def test_a_closed_executor_says_so(tiny: TinyModels) -> None:
    executor = HostExecutor(tiny.get("llama").bundle, threads=1)
    executor.close()
    executor.close()
    for call in (
        lambda: executor.read("logits"),
        lambda: executor.write("logits", np.zeros((1, 1), np.float32)),
        lambda: executor.staging("logits", 1),
        lambda: executor.run("decode", **DIMS, sequence_length=1),
    ):
        with pytest.raises(ExecutorError, match="closed"):
            call()


def test_nothing_is_allocated_after_start(tiny: TinyModels) -> None:
    model = tiny.get("qwen2_vl")
    with running(model) as runner:
        for length in (1, 70, 3):
            logits = prefill(runner, 0, make_prompt(model, "x" * length))
            runner.decode([(runner.slots[0], int(logits.argmax()))])
        executor = runner.executor
        assert isinstance(executor, HostExecutor)
        assert executor.allocations_after_start == 0
        with pytest.raises(ExecutorError, match="bug"):
            executor._take(1)
        assert executor.allocations_after_start == 1


def test_more_threads_than_cores_change_no_token(tiny: TinyModels) -> None:
    model = tiny.get("llama")
    prompt = make_prompt(model, "What is this?")
    with running(model) as runner:
        expected = prefill(runner, 0, prompt)
    executor = HostExecutor(model.bundle, threads=4)
    found = prefill(ModelRunner(model.bundle, executor), 0, prompt)
    executor.close()
    assert found.argmax() == expected.argmax()
    assert LIMITS["slots"] == len(runner.slots)
