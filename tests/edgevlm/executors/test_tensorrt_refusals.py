"""Everything that TensorRT, the driver and the files can refuse: named, and nothing left behind."""

import dataclasses
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgevlm.bundle import Bundle
from edgevlm.errors import BundleError, ExecutorError
from edgevlm.runner import ModelRunner
from tests.cuda_stub import OUT_OF_MEMORY, Stub
from tests.scripted_bundles import (
    OLD,
    SMALL,
    TEXT,
    VERSIONS,
    Bundles,
    Install,
    answer,
    changed,
    with_pool,
)
from tests.tiny_models import TinyModels, make_prompt, prefill

REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "engine": (lambda f: setattr(f, "no_engine", True), r"llm\.\d\.engine: .*not compatible"),
    "context": (lambda f: setattr(f, "no_context", True), r"no context for prefill: Cannot create"),
    "profile": (lambda f: setattr(f, "no_profile", True), r"profile 0 for prefill: Error in set"),
    "enqueue": (lambda f: setattr(f, "no_enqueue", True), r"prefill was not enqueued: enqueue"),
    "shapes": (lambda f: setattr(f, "no_shapes", True), r"the shapes of prefill: shape inference"),
    "shape": (lambda f: f.shapes.add("position_ids"), r"shape \[1, 1\] of position_ids: set_input"),
    "address": (lambda f: f.addresses.add("logits"), r"address 0x[0-9a-f]+ of logits: set_tensor"),
    "host": (lambda f: f.host_tensors.add("rope_cos"), r"wants rope_cos in host memory"),
    "memory": (lambda f: setattr(f, "allocate_at_enqueue", 1 << 40), r"no memory for a temporary"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refusal_is_named_and_leaves_nothing(
    bundles: Bundles, install: Install, start: Any, stub: Stub, what: str
) -> None:
    scripted = install()
    go_wrong, words = REFUSALS[what]
    go_wrong(scripted.faults)
    with pytest.raises(ExecutorError, match=words):
        start(bundles.get(TEXT, limits=SMALL))
    gc.collect()
    assert stub.leaks() == {}


def test_an_allocation_after_start_is_refused_and_counted(
    tiny: TinyModels, bundles: Bundles, install: Install, start: Any, stub: Stub
) -> None:
    scripted = install()
    bundle = bundles.get(TEXT, limits=SMALL)
    executor = start(bundle)
    runner = ModelRunner(bundle, executor)
    used = stub.used
    scripted.faults.allocate_at_enqueue = 100
    with pytest.raises(ExecutorError, match="no memory for a temporary"):
        prefill(runner, 0, make_prompt(tiny.get(TEXT), "Who?"))
    assert executor.allocations_after_start == 1 and stub.used == used


def damaged(bundle: Bundle, out: Path, change: Callable[[bytes], bytes]) -> Bundle:
    """A copy whose first engine is changed, and recorded with the length it has now."""
    out.mkdir()
    files = dict(bundle.manifest.files)
    for name in files:
        data = bundle.file(name).read_bytes()
        if name == "llm.0.engine":
            data = change(data)
            files[name] = dataclasses.replace(files[name], bytes=len(data))
        (out / name).write_bytes(data)
    return Bundle(out, dataclasses.replace(bundle.manifest, files=files))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: b"", "Magic tag does not match"),
        (lambda d: d[:1000], "(?s)Size specified in header"),
        (lambda d: d[:-1], "Size specified in header"),
        (lambda d: b"\x08\x0b" + d, "Magic tag does not match"),
    ],
    ids=["empty", "1000 bytes", "last byte", "an ONNX file"],
)
def test_a_damaged_engine_is_one_clear_error(
    bundles: Bundles, install: Install, start: Any, tmp_path: Path, change: Any, words: str
) -> None:
    install()
    bundle = damaged(bundles.get(TEXT, limits=SMALL), tmp_path / "b", change)
    with pytest.raises(ExecutorError, match=words):
        start(bundle)


def test_a_truncated_or_missing_engine_is_named(
    bundles: Bundles, install: Install, start: Any, tmp_path: Path
) -> None:
    install()
    bundle = damaged(bundles.get(TEXT, limits=SMALL), tmp_path / "b", lambda d: d)
    path = bundle.file("llm.0.engine")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(BundleError, match=r"llm\.0\.engine ends at byte"):
        start(bundle)
    path.unlink()
    with pytest.raises(BundleError, match=r"llm\.0\.engine cannot be opened"):
        start(bundle)


def test_a_manifest_that_is_not_the_engines(bundles: Bundles, install: Install, start: Any) -> None:
    install()
    bundle = bundles.get(TEXT, limits=SMALL)

    def edited(**changes: Any) -> Bundle:
        phases = {}
        for phase, stages in bundle.manifest.phases.items():
            first = stages[0]
            inputs = (dataclasses.replace(first.inputs[0], **changes), *first.inputs[1:])
            phases[phase] = (dataclasses.replace(first, inputs=inputs), *stages[1:])
        return changed(bundle, phases=phases)

    with pytest.raises(ExecutorError, match=r"differ in inputs_embeds, x; build the bundle again"):
        start(edited(name="x"))
    with pytest.raises(ExecutorError, match=r"inputs_embeds is .*float16 in the manifest"):
        start(edited(dtype="float16"))
    with pytest.raises(ExecutorError, match=r"needs 4,096 bytes of scratch .* has 4,095"):
        start(with_pool(bundle, "activations", 4095))


def test_an_alias_must_be_where_its_input_is(
    bundles: Bundles, install: Install, start: Any
) -> None:
    install()
    bundle = bundles.get(TEXT, limits=SMALL)
    phases = {}
    for phase, stages in bundle.manifest.phases.items():
        outputs = tuple(
            dataclasses.replace(o, placement="past_key_values.0.value")
            if o.name == "present.0.key"
            else o
            for o in stages[0].outputs
        )
        phases[phase] = (dataclasses.replace(stages[0], outputs=outputs), *stages[1:])
    with pytest.raises(ExecutorError, match=r"present\.0\.key is the same memory as past_key"):
        start(changed(bundle, phases=phases))


def test_weights_that_do_not_fit_are_named(
    bundles: Bundles, install: Install, start: Any, stub: Stub
) -> None:
    install()
    bundle = bundles.get(TEXT, limits=SMALL)
    stub.fail("cuMemAlloc ".strip(), 1, OUT_OF_MEMORY)  # weights are the largest pool
    with pytest.raises(ExecutorError, match=r"^weights\.llm: the device refused .*OUT_OF_MEMORY"):
        start(bundle)


def test_another_release_and_none(
    bundles: Bundles, install: Install, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundles.get(TEXT, limits=SMALL)
    install(OLD)
    with pytest.raises(ExecutorError, match=r"native bundle needs tensorrt 10\.15 .* is 10\.3"):
        start(bundle)
    install("8.6.1")
    with pytest.raises(ExecutorError, match=r"needs tensorrt 10\.3 or newer"):
        start(bundles.get(TEXT, "classic", limits=SMALL))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ExecutorError, match="not installed here .*python3-libnvinfer"):
        start(bundle)


def test_work_that_fails_late_is_told_where_it_is_waited_for(
    tiny: TinyModels, bundles: Bundles, install: Install, start: Any
) -> None:
    scripted = install()
    model, bundle = tiny.get(TEXT), bundles.get(TEXT, limits=SMALL)
    runner = ModelRunner(bundle, start(bundle))
    tokens, _ = answer(runner, model, [])
    scripted.faults.crash = True
    with pytest.raises(ExecutorError, match="CUDA_ERROR_LAUNCH_FAILED"):
        answer(runner, model, [])
    scripted.faults.crash = False
    assert answer(runner, model, [])[0] == tokens


def test_what_does_not_fit_is_refused(bundles: Bundles, install: Install, start: Any) -> None:
    install(OLD)
    executor = start(bundles.get(TEXT, "classic", limits=SMALL))
    dims = {"batch_size": 1, "sequence_length": 4, "row": 0, "slot": 0}
    with pytest.raises(ValueError, match="does not fit inputs_embeds"):
        executor.run("prefill", **(dims | {"row": 63}))
    with pytest.raises(ValueError, match="rows 1 to 2 of write_indices, which has 1"):
        executor.write("write_indices", np.zeros(1, np.int64), 1)
    with pytest.raises(ValueError, match="no tensor 'x'"):
        executor.read("x")
    with pytest.raises(ExecutorError, match="no vision graph"):
        executor.run("vision", num_patches=4, num_image_tokens=1, image_row=0)
    executor.write("write_indices", np.array([61]))
    with pytest.raises(ExecutorError, match="prefill of 4 tokens at 61 does not fit a cache of 64"):
        executor.run("prefill", **dims)


@pytest.mark.parametrize("lowering", ["native", "classic"])
def test_every_call_that_fails_is_one_clear_error_and_leaves_nothing(
    tiny: TinyModels, bundles: Bundles, install: Install, stub: Stub, lowering: str
) -> None:
    from edgevlm.executors.tensorrt import TensorRTExecutor

    install(VERSIONS[lowering])
    model, bundle = tiny.get(TEXT), bundles.get(TEXT, lowering, limits=SMALL)
    prompt = make_prompt(model, "Hi")

    def whole_life() -> None:
        executor = TensorRTExecutor(bundle)
        try:
            runner = ModelRunner(bundle, executor)
            logits = prefill(runner, 0, prompt)
            runner.decode([(runner.slots[0], int(logits.argmax()))])
        finally:
            executor.close()

    before = stub.calls
    whole_life()
    count = stub.calls - before
    failed = 0
    for index in range(1, count + 1):
        stub.fail("", index)
        try:
            whole_life()
        except ExecutorError as error:
            failed += 1
            assert "CUDA_ERROR_UNKNOWN" in str(error) or "CUDA error" in str(error), str(error)
        stub.fail("", 0)
        assert stub.leaks() == {}, f"call {index} of {count}"
    assert failed > count // 2
    whole_life()
