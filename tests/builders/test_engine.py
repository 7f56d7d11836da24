"""Stages are compiled in children, reported, kept, and survive kill -9. No GPU, no model."""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders import engine
from builders.engine import (
    Compiler,
    Profile,
    Stage,
    StageProgress,
    compile_stage,
    compile_stages,
    finished_report,
    plan_stages,
    report_file,
)
from builders.graph import Graph
from edgevlm.bundle import TensorSpec
from edgevlm.errors import BuildError

rtx = pytest.mark.rtx
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed"
)
ROOT = Path(__file__).resolve().parents[2]
RTX = Compiler("tensorrt-rtx", "SM86")
PROFILES = (
    Profile("prefill", {"batch_size": (1, 1, 1), "sequence_length": (1, 32, 32)}),
    Profile("decode", {"batch_size": (1, 4, 4), "sequence_length": (1, 1, 1)}),
)
WIDTH = 256  # its weight is large enough to lie in the data file


def write_graph(path: Path, seed: int = 0, op: str = "MatMul", domain: str = "") -> None:
    weight = np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float16)
    shape = ("batch_size", "sequence_length", WIDTH)
    with Graph(path, 20, 10) as g:
        g.input(TensorSpec("x", "float16", shape, "x"))
        g.node(op, ["x", g.weight("w", weight)], "/y", "y", domain=domain)
        g.output(TensorSpec("y", "float16", shape, "y"))
        g.save()


def chain(directory: Path, count: int = 3) -> list[Stage]:
    stages = []
    for i in range(count):
        onnx = directory / f"llm.{i}.onnx"
        if not onnx.exists():
            write_graph(onnx, seed=i)
        stages.append(Stage(f"llm.{i}", onnx, directory / f"llm.{i}.engine", PROFILES))
    return stages


def states(stages: list[Stage], compiler: Compiler = RTX) -> list[str]:
    events: list[StageProgress] = []
    compile_stages(stages, compiler, events.append)
    return [e.state for e in events if e.state != "started"]


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in task.read_text().split()]
    return found


def compiler_child(pid: int, timeout: float = 30) -> int:
    """Wait until the process has a compiler under it."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        for child in children(pid):
            try:
                if b"builders.compile_child" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return child
            except OSError:
                continue
        time.sleep(0.005)
    raise AssertionError("no compiler was started")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("layers", "head", "limit", "expected"),
    [
        ([5, 5, 5, 5], 5, 100, [(0, 4, True)]),
        ([5, 5, 5, 5], 5, 20, [(0, 3, False), (3, 4, True)]),  # 15 + 10, not 20 + 5
        ([5, 5, 5, 5], 9, 10, [(0, 2, False), (2, 4, False), (4, 4, True)]),
        ([7, 7, 7], 1, 8, [(0, 1, False), (1, 2, False), (2, 3, True)]),
        ([9, 1, 1, 9], 0, 10, [(0, 2, False), (2, 4, True)]),
        ([], 3, 10, [(0, 0, True)]),
    ],
)
def test_plan_stages(layers, head, limit, expected):
    found = plan_stages(layers, head, limit)
    assert [(p.first_layer, p.end_layer, p.head) for p in found] == expected
    assert sum(p.bytes for p in found) == sum(layers) + head
    assert max(p.bytes for p in found) <= limit


def test_plan_stages_of_the_7b():
    plans = plan_stages([120_164_000] * 28, 281_000_000)
    assert len(plans) == 4 and all(p.bytes <= engine.STAGE_BYTES for p in plans)
    assert [p.end_layer for p in plans[:-1]] == [p.first_layer for p in plans[1:]]


@pytest.mark.parametrize(
    ("layers", "head", "what"), [([3, 11, 3], 1, "layer 1"), ([3], 12, "the head")]
)
def test_plan_stages_refuses_what_cannot_be_cut(layers, head, what):
    with pytest.raises(BuildError, match=f"{what} alone has 1[12] bytes .* may have 10"):
        plan_stages(layers, head, 10)


@pytest.mark.parametrize("bounds", [(0, 1, 1), (4, 2, 8), (1, 9, 8)])
def test_a_range_must_rise(tmp_path, bounds):
    write_graph(tmp_path / "a.onnx")
    profile = Profile("decode", {"batch_size": bounds, "sequence_length": (1, 1, 1)})
    with pytest.raises(BuildError, match="profile decode gives batch_size the range"):
        compile_stage(tmp_path / "a.onnx", [profile], tmp_path / "a.engine", compiler=RTX)


def test_missing_onnx(tmp_path):
    with pytest.raises(BuildError, match=r"nowhere\.onnx is missing"):
        compile_stage(tmp_path / "nowhere.onnx", PROFILES, tmp_path / "a.engine", compiler=RTX)


def test_missing_weights(tmp_path):
    write_graph(tmp_path / "a.onnx")
    (tmp_path / "a.onnx.data").unlink()
    with pytest.raises(BuildError, match=r"a\.onnx\.data is missing"):
        compile_stage(tmp_path / "a.onnx", PROFILES, tmp_path / "a.engine", compiler=RTX)


def test_missing_compiler(tmp_path, monkeypatch):
    monkeypatch.setitem(engine.PACKAGES, "tensorrt-rtx", ("no-such-package",))
    with pytest.raises(BuildError, match=r"tensorrt-rtx is not installed here; pip install"):
        compile_stages(chain(tmp_path, 1), RTX)


@rtx
@needs_rtx
def test_report_has_the_compilers_figures(tmp_path):
    (stage,) = chain(tmp_path, 1)
    (report,) = compile_stages([stage], RTX)
    assert report.weights_bytes == pytest.approx(WIDTH * WIDTH * 2, rel=0.02)
    assert set(report.scratch_bytes) == {"prefill", "decode"}
    assert report.plan_bytes == stage.engine.stat().st_size > report.weights_bytes
    assert report.layers["MATRIX_MULTIPLY"] == 1
    assert 50e6 < report.peak_bytes < 2e9 and report.seconds > 0
    assert report.compiler.startswith("tensorrt-rtx 1.")
    assert finished_report(stage, RTX) == report
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"llm.0.onnx", "llm.0.onnx.data", "llm.0.engine", "llm.0.engine.json"}


@rtx
@needs_rtx
def test_finished_stages_are_kept_and_changed_ones_are_not(tmp_path):
    stages = chain(tmp_path, 2)
    assert states(stages) == ["finished", "finished"]
    before = stages[0].engine.stat().st_mtime_ns
    assert states(stages) == ["kept", "kept"]
    assert stages[0].engine.stat().st_mtime_ns == before
    write_graph(stages[1].onnx, seed=9)  # other weights
    assert states(stages) == ["kept", "finished"]
    longer = (replace(PROFILES[0], dims={**PROFILES[0].dims, "sequence_length": (1, 64, 64)}),)
    assert states([stages[0], replace(stages[1], profiles=longer)]) == ["kept", "finished"]
    with stages[0].engine.open("r+b") as file:
        file.truncate(100)
    assert states(stages[:1]) == ["finished"]
    report_file(stages[0].engine).write_text("{")
    assert finished_report(stages[0], RTX) is None
    assert finished_report(stages[1], Compiler("tensorrt-rtx", "SM89")) is None


@rtx
@needs_rtx
def test_graphs_are_written_when_needed_and_removed(tmp_path):
    written: list[str] = []

    def make() -> None:
        written.append("a")
        write_graph(tmp_path / "graphs" / "a.onnx")

    onnx, engine_file = tmp_path / "graphs" / "a.onnx", tmp_path / "a.engine"
    stage = Stage("a", onnx, engine_file, PROFILES, make, "recipe 1")
    assert states([stage]) == ["finished"]
    assert states([stage]) == ["kept"]
    assert written == ["a"] and not list(onnx.parent.iterdir())
    assert states([replace(stage, key="recipe 2")]) == ["finished"]


@rtx
@needs_rtx
def test_the_compilers_words_are_passed_on(tmp_path):
    write_graph(tmp_path / "a.onnx", op="Frobnicate", domain="nowhere")
    with pytest.raises(BuildError, match=r"Plugin not found.*/y \[Frobnicate\]") as caught:
        compile_stage(tmp_path / "a.onnx", PROFILES, tmp_path / "a.engine", compiler=RTX)
    assert str(caught.value).startswith("a was not compiled: tensorrt-rtx says: ")
    assert not list(tmp_path.glob("*.engine*"))


@rtx
@needs_rtx
def test_a_profile_must_name_every_dim(tmp_path):
    write_graph(tmp_path / "a.onnx")
    profile = Profile("decode", {"batch_size": (1, 1, 1)})
    words = "input x has the dimension 'sequence_length', for which profile decode gives no range"
    with pytest.raises(BuildError, match=words):
        compile_stage(tmp_path / "a.onnx", [profile], tmp_path / "a.engine", compiler=RTX)


@rtx
@needs_rtx
def test_a_killed_child_is_explained_and_the_rest_goes_on(tmp_path):
    stages = chain(tmp_path)

    def kill_second(event: StageProgress) -> None:
        if (event.number, event.state) == (2, "started"):
            threading.Thread(
                target=lambda: os.kill(compiler_child(os.getpid()), signal.SIGKILL)
            ).start()

    with pytest.raises(BuildError) as caught:
        compile_stages(stages, RTX, kill_second)
    text = str(caught.value)
    assert "compiling llm.1 was stopped by signal 9 (SIGKILL)" in text
    assert "memory ran out" in text and "finished stages are kept" in text
    assert not list(tmp_path.glob("*.part"))
    assert [stage.engine.exists() for stage in stages] == [True, False, False]
    assert states(stages) == ["kept", "finished", "finished"]


@rtx
@needs_rtx
def test_a_killed_parent_leaves_no_compiler_and_the_next_run_goes_on(tmp_path):
    stages = chain(tmp_path)
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from builders.engine import Compiler, Profile, Stage, compile_stages
        at = Path(sys.argv[1])
        one, chunk, slots = (1, 1, 1), (1, 32, 32), (1, 4, 4)
        profiles = (
            Profile("prefill", {"batch_size": one, "sequence_length": chunk}),
            Profile("decode", {"batch_size": slots, "sequence_length": one}),
        )
        stages = [
            Stage(f"llm.{i}", at / f"llm.{i}.onnx", at / f"llm.{i}.engine", profiles)
            for i in range(3)
        ]
        compile_stages(stages, Compiler(), lambda e: print(e.number, e.state, flush=True))
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            if line.strip() == "2 started":
                break
        child = compiler_child(parent.pid)
        parent.kill()
    end = time.monotonic() + 10
    while not gone(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert gone(child)
    assert not stages[1].engine.exists()
    assert states(stages) == ["kept", "finished", "finished"]
    assert not list(tmp_path.glob("*.part"))
