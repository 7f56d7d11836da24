"""The TensorRT executor end to end on stub memory: the host executor's tokens, every refusal named.

TensorRT is scripted (tests/scripted_tensorrt.py); the driver, the arena, streams, graphs, copies
and readers are the real ones on the stand-in for libcuda.
"""

import dataclasses
import gc
import importlib
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgevlm
from edgevlm.bundle import write_manifest
from edgevlm.device import read_machine
from edgevlm.errors import ExecutorError
from edgevlm.runner import ModelRunner
from edgevlm.sampling import SamplingParams
from tests.cuda_stub import D2D, D2H, H2D, Stub
from tests.scripted_bundles import (
    OLD,
    SMALL,
    TEXT,
    VERSIONS,
    VLM,
    Bundles,
    Install,
    answer,
    expected,
    with_pool,
)
from tests.tiny_models import TinyModels, assert_close, make_prompt, picture, prefill, running


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("lowering", ["native", "classic"])
def test_it_answers_as_the_host_does(
    tiny: TinyModels,
    bundles: Bundles,
    install: Install,
    start: Any,
    stub: Stub,
    lowering: str,
    dtype: str,
) -> None:
    install(VERSIONS[lowering])
    model = tiny.get(VLM)
    executor = start(bundles.get(VLM, lowering, dtype))
    runner = ModelRunner(bundles.get(VLM, lowering, dtype), executor)
    # two pictures of one size in one slot after the other: nothing of the first may be left
    asked = ([picture(80, 100)], [picture(80, 100, 1), picture(60, 60)])
    for pictures, (tokens, logits) in zip(asked, expected(model, *asked), strict=True):
        found, own = answer(runner, model, pictures)
        assert found == tokens
        assert_close(own, logits, 0.9999999 if dtype == "float32" else 0.9999)
    assert executor.allocations_after_start == 0 and stub.lib.stub_unpinned() == 0


@pytest.mark.parametrize("lowering", ["native", "classic"])
def test_slots_decode_in_one_batch(
    tiny: TinyModels, bundles: Bundles, install: Install, start: Any, lowering: str
) -> None:
    install(VERSIONS[lowering])
    model = tiny.get(TEXT)
    bundle = bundles.get(TEXT, lowering)
    runner = ModelRunner(bundle, start(bundle))
    questions = ("Who?", "What is the time now?", "Why")

    def together(runner: ModelRunner) -> list[np.ndarray]:
        last = {}
        for slot, text in enumerate(questions):
            last[slot] = prefill(runner, slot, make_prompt(model, text))
        out = []
        for slots in ((0, 1, 2), (0, 2), (1,), (1, 2), (0, 1, 2)):
            steps = [(runner.slots[s], int(last[s].argmax())) for s in slots]
            found = {s: v.copy() for s, v in runner.decode(steps).items()}
            last |= found
            out += [found[s] for s in slots]
        return out

    with running(model) as host:
        wanted = together(host)
    for own, one in zip(together(runner), wanted, strict=True):
        assert_close(own, one, 0.9999999)


def test_features_never_leave_the_device_and_only_logits_come_back(
    tiny: TinyModels, bundles: Bundles, install: Install, start: Any, stub: Stub
) -> None:
    install()
    model, bundle = tiny.get(VLM), bundles.get(VLM)
    executor = start(bundle)
    runner = ModelRunner(bundle, executor)
    pictures = [picture(80, 100)]
    executor.read("write_indices")  # waits for what was written at start
    before = dataclasses.replace(executor.copied)
    real = [stub.copied(way) for way in (H2D, D2H, D2D)]
    with stub.trace() as trace:
        tokens, _ = answer(runner, model, pictures)
    row = model.bundle.manifest.model.text.vocab_size * 4
    assert executor.copied.d2h - before.d2h == (1 + len(tokens)) * row
    assert executor.copied.d2d == before.d2d, "the tower writes where the prompt is read"
    moved = [stub.copied(way) - b for way, b in zip((H2D, D2H, D2D), real, strict=True)]
    after = executor.copied
    assert moved == [after.h2d - before.h2d, after.d2h - before.d2h, after.d2d - before.d2d]
    names = trace.names()
    until_logits = names[: names.index("cuMemcpyDtoHAsync")]
    assert "cuStreamSynchronize" not in until_logits, "the host does not wait between"
    assert until_logits.count("cuStreamWaitEvent") == 2  # vision for text, then text for vision


def test_rows_that_are_not_aligned_take_one_copy_on_the_device(
    tiny: TinyModels, bundles: Bundles, install: Install, start: Any
) -> None:
    install()
    model, bundle = tiny.get(VLM), bundles.get(VLM, dtype="float16")
    executor = start(bundle)
    runner = ModelRunner(bundle, executor)
    pictures = [picture(80, 100)]
    prompt = make_prompt(model, "What is it?", pictures)
    run = prompt.image_runs[0]
    row = model.bundle.manifest.model.text.hidden_size * 2
    assert row % 256 == 128 and run.start % 2 == 1
    before = executor.copied.d2d
    prefill(runner, 0, prompt, pictures)
    assert executor.copied.d2d - before == run.length * row
    assert executor.copied.d2h == model.bundle.manifest.model.text.vocab_size * 4
    assert executor.taken["aligned rows"] > 0


def test_a_decode_step_is_one_launch(
    tiny: TinyModels, bundles: Bundles, install: Install, start: Any, stub: Stub
) -> None:
    install()
    model, bundle = tiny.get(TEXT), bundles.get(TEXT)
    runner = ModelRunner(bundle, start(bundle))
    prefill(runner, 0, make_prompt(model, "Who?"))
    with stub.trace() as trace:
        runner.decode([(runner.slots[0], 65)])
    assert trace.names() == [
        *["cuCtxSetCurrent"],  # staging
        *["cuCtxSetCurrent", "cuMemcpyHtoDAsync"] * 3,
        *["cuCtxSetCurrent", "cuGraphLaunch"],
        *["cuCtxSetCurrent", "cuMemcpyDtoHAsync", "cuStreamSynchronize"],
    ]
    assert any("2 nodes" in line for line in trace.lines), "both stages in one graph"


def test_without_graphs_it_runs_plainly(
    tiny: TinyModels, bundles: Bundles, install: Install, start: Any, stub: Stub
) -> None:
    install()
    model, bundle = tiny.get(TEXT), bundles.get(TEXT, limits=SMALL)
    stub.fail("cuStreamBeginCapture", 1)
    runner = ModelRunner(bundle, start(bundle))
    launches = stub.lib.stub_launches()
    [(tokens, logits)] = expected(model, [])
    found, own = answer(runner, model, [])
    assert found == tokens and stub.lib.stub_launches() == launches
    assert_close(own, logits, 0.9999999)


@pytest.mark.parametrize(
    ("version", "lowering", "reader"),
    [
        ("10.3.0.30", "classic", "IStreamReader"),
        ("10.7.0", "classic", "IStreamReaderV2"),
        ("10.16.2.10", "native", "IStreamReaderV2"),
        ("11.4.0.106", "native", "IStreamReaderV2"),
    ],
)
def test_each_release_reads_engines_its_own_way(
    bundles: Bundles, install: Install, start: Any, version: str, lowering: str, reader: str
) -> None:
    scripted = install(version)
    start(bundles.get(TEXT, lowering, limits=SMALL))
    assert set(scripted.sources) == {reader}


def test_rtx_has_the_same_executor(bundles: Bundles, install: Install, start: Any) -> None:
    from edgevlm.executors.tensorrt import TensorRTRTXExecutor

    scripted = install("1.7.1.116", "tensorrt_rtx")
    scripted.version = "10.16"  # what it has; its own number counts otherwise
    module = scripted.module()
    module.__version__ = "1.7.1.116"  # type: ignore[attr-defined]
    sys.modules["tensorrt_rtx"] = module
    start(bundles.get(TEXT, limits=SMALL), TensorRTRTXExecutor)


def test_a_vlm_on_a_board(tiny: TinyModels, bundles: Bundles, install: Install) -> None:
    install(OLD)
    tree = Path(__file__).resolve().parents[2] / "trees/orin-nano-8gb-jp62"
    board = read_machine(tree)
    board = replace(board, libraries=replace(board.libraries, cuda_bindings="12.9.10"))
    bundle = bundles.get(VLM, "classic", "float16")
    write_manifest(bundle.path, bundle.manifest)
    ask = {"images": [picture(80, 100)], "params": SamplingParams(max_tokens=5, temperature=0)}
    with edgevlm.VLM(tiny.get(VLM).bundle.path, threads=1) as host:
        wanted = host.generate("What is it?", **ask)
    with edgevlm.VLM(bundle.path, machine=board) as vlm:
        found = vlm.generate("What is it?", **ask)
        assert found.token_ids == wanted.token_ids
        assert found.memory["allocations_after_start"] == 0


def test_vlm_knows_both_names() -> None:
    from edgevlm.vlm import EXECUTORS

    for name in ("tensorrt", "tensorrt-rtx"):
        module, attribute = EXECUTORS[name]
        assert getattr(importlib.import_module(module), attribute).flavour == name


def test_closing_twice_while_busy_and_using_it_after(
    bundles: Bundles, install: Install, start: Any, stub: Stub
) -> None:
    scripted = install()
    executor = start(bundles.get(TEXT, limits=SMALL))
    dims = {"batch_size": 1, "sequence_length": 4, "row": 0, "slot": 0}
    runs = len(scripted.runs)
    executor.run("prefill", **dims)
    assert len(scripted.runs) == runs, "it is still waiting on its stream"
    executor.close()
    executor.close()
    assert len(scripted.runs) > runs
    gc.collect()
    assert stub.leaks() == {}
    for use in (
        lambda: executor.run("prefill", **dims),
        lambda: executor.read("logits"),
        lambda: executor.write("write_indices", np.zeros(1, np.int64)),
        lambda: executor.staging("inputs_embeds", 1),
    ):
        with pytest.raises(ExecutorError, match="this executor is closed"):
            use()


def test_closing_in_another_thread(bundles: Bundles, install: Install, start: Any) -> None:
    install()
    executor = start(bundles.get(TEXT, limits=SMALL))
    thread = threading.Thread(target=executor.close)
    thread.start()
    thread.join()


def test_two_executors_in_one_process(
    tiny: TinyModels, bundles: Bundles, install: Install, start: Any, stub: Stub
) -> None:
    install()
    model, bundle = tiny.get(TEXT), bundles.get(TEXT, limits=SMALL)
    [(tokens, _)] = expected(model, [])
    first, second = start(bundle), start(bundle)
    one, two = ModelRunner(bundle, first), ModelRunner(bundle, second)
    assert answer(one, model, [])[0] == tokens
    assert answer(two, model, [])[0] == tokens
    used = stub.used
    first.close()
    gc.collect()
    assert stub.used == used // 2
    assert answer(two, model, [])[0] == tokens


def test_requests_come_from_any_thread(
    tiny: TinyModels, bundles: Bundles, install: Install, start: Any
) -> None:
    install()
    model, bundle = tiny.get(TEXT), bundles.get(TEXT, limits=SMALL)
    runner = ModelRunner(bundle, start(bundle))
    [(tokens, _)] = expected(model, [])
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(answer(runner, model, [])[0]))
    thread.start()
    thread.join()
    assert found == [tokens]


def test_a_ring_too_small_for_logits_reads_them_in_pieces(
    tiny: TinyModels, bundles: Bundles, install: Install, start: Any
) -> None:
    install()
    model = tiny.get(TEXT)
    bundle = with_pool(bundles.get(TEXT), "staging", (32 << 10) + 1024)
    runner = ModelRunner(bundle, start(bundle))
    assert answer(runner, model, [])[0] == expected(model, [])[0][0]
    with pytest.raises(ExecutorError, match="staging has 4,096 bytes"):
        start(with_pool(bundles.get(TEXT, limits=SMALL), "staging", 4096))
