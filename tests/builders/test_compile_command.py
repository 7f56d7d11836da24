"""A bundle prepared for a board, and finished there; tensorrt-rtx stands in for the board."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import KINDS, LIMITS, random_model, save_checkpoint

from builders import compile as module
from builders import compile_child, targets
from builders.build import BuildOptions, build
from builders.compile import compile_bundle
from builders.engine import Compiler
from edgevlm.bundle import LLM_GRAPH, open_bundle
from edgevlm.cli import main
from edgevlm.device import Machine
from edgevlm.errors import BuildError, BundleError
from edgevlm.libraries import Libraries
from edgevlm.meminfo import Memory
from edgevlm.vlm import VLM

ROOT = Path(__file__).resolve().parents[2]
rtx = pytest.mark.rtx
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed"
)
OPTIONS = {**LIMITS, "reference": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("compile") / "checkpoint"
    save_checkpoint(random_model(KINDS["qwen2_vl"]), KINDS["qwen2_vl"], path)
    return path


@pytest.fixture
def prepared(checkpoint, tmp_path, monkeypatch):
    """A bundle whose board's compiler is one that is here."""
    board = targets.Target(
        "board",
        "tensorrt-rtx",
        ("native", "classic"),
        Compiler("tensorrt-rtx", "SM86"),
        here=False,
    )
    monkeypatch.setitem(targets.TARGETS, "board", board)
    return build(checkpoint, tmp_path / "out", BuildOptions(target="board", **OPTIONS)).path


@pytest.mark.parametrize("lowering", ["classic", "native"])
def test_prepared_for_an_orin_nano(checkpoint, tmp_path, lowering):
    options = BuildOptions(target="orin-nano-8gb", lowering=lowering, **OPTIONS)
    bundle = build(checkpoint, tmp_path / "out", options)
    manifest = open_bundle(bundle.path).manifest
    assert (manifest.lowering, manifest.executor, manifest.built_on) == (lowering, "tensorrt", None)
    pending = manifest.pending
    assert (pending.compiler, pending.compute_capability) == ("tensorrt", None)
    assert pending.workspace >= 64 << 20
    assert [stage.part for stage in pending.stages] == ["llm", "vision"]
    assert pending.stages[0].profiles["decode"]["batch_size"] == (1, 3, 3)
    assert {"llm.onnx", "llm.onnx.data", "vision.onnx", "reference.npz"} <= set(manifest.files)
    assert {s.file for stages in manifest.phases.values() for s in stages} == {
        "llm.engine",
        "vision.engine",
    }
    for begin in (VLM, lambda path: main(["run", str(path), "hello"])):
        try:
            assert begin(bundle.path) == 1
        except BundleError as error:
            assert "run `edgevlm compile BUNDLE` on the board" in str(error)


def test_the_compile_command_needs_no_onnx_and_no_torch():
    code = "import builders.compile, sys; print(*{m.partition('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    heavy = {"onnx", "torch", "transformers", "safetensors", "ml_dtypes", "onnxruntime"}
    assert not heavy & set(done.stdout.split())


def test_a_compiler_that_is_missing_leaves_the_bundle_as_it_was(checkpoint, tmp_path):
    options = BuildOptions(target="orin-nano-8gb", **OPTIONS)
    bundle = build(checkpoint, tmp_path / "out", options)
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is here")
    with pytest.raises(BuildError, match="tensorrt is not installed here; on a Jetson"):
        compile_bundle(bundle.path)
    assert open_bundle(bundle.path).manifest == bundle.manifest
    assert os.listdir(tmp_path) == ["out"]


def test_another_boards_tensorrt_is_refused_before_any_work(checkpoint, tmp_path):
    options = BuildOptions(target="orin-nano-8gb", lowering="native", **OPTIONS)
    bundle = build(checkpoint, tmp_path / "out", options)
    old = Machine(libraries=Libraries(tensorrt="10.3.0.30", tensorrt_python="10.3.0"))
    with pytest.raises(BundleError, match="TensorRT 10.15 for native"):
        compile_bundle(bundle.path, machine=old)


def test_too_little_memory_is_refused_unless_forced(prepared):
    poor = Machine(memory=Memory(available=1 << 30))
    with pytest.raises(BuildError, match="may take 1,1.*can be had.*--force"):
        compile_bundle(prepared, machine=poor)


@rtx
@needs_rtx
def test_from_prepared_to_compiled(prepared, tmp_path, capsys):
    before = open_bundle(prepared).manifest
    assert main(["compile", str(prepared), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["build"]["engines"]["llm"]["stages"][0]["plan_bytes"] > 0
    manifest = open_bundle(prepared).manifest
    assert manifest.pending is None
    assert manifest.built_on.compute_capability == "8.6" and manifest.built_on.tensorrt
    assert {"llm.engine", "vision.engine"} <= set(manifest.files)
    assert not [name for name in manifest.files if "onnx" in name]
    assert sorted(os.listdir(prepared)) == sorted([*manifest.files, "bundle.json"])
    pools = {pool.name: pool for pool in manifest.plan.pools}
    for name in ("weights.llm", "weights.vision", "activations"):
        assert pools[name].source == "reported"
    assert manifest.plan.placements == before.plan.placements
    with pytest.raises(BuildError, match="compiled already"):
        compile_bundle(prepared)
    assert os.listdir(tmp_path) == ["out"]


@rtx
@needs_rtx
def test_what_was_compiled_is_kept_when_a_later_stage_fails(prepared, monkeypatch):
    whole = open_bundle(prepared).manifest

    def fails(*_):
        raise BuildError("no")

    monkeypatch.setattr(module, "_finished", fails)
    with pytest.raises(BuildError, match="no"):
        compile_bundle(prepared)
    assert open_bundle(prepared).manifest == whole
    monkeypatch.undo()
    told = []
    compile_bundle(prepared, keep_onnx=True, progress=lambda *step: told.append(step))
    assert ("compiling llm", 0, told[-1][2]) not in told  # nothing was started again
    assert LLM_GRAPH in open_bundle(prepared).manifest.files


# Not of TensorRT: of tensorrt-rtx alone, which says which GPU it compiles for.
RTX_ALONE = {"ComputeCapability", "num_compute_capabilities", "set_compute_capability"}
FROM_10_13 = {"IStreamWriter", "build_serialized_network_to_stream"}  # behind a hasattr
OBJECTS = {"trt", "builder", "network", "parser", "config", "profile", "tensor", "engine", "timed"}


def test_every_name_of_tensorrt_that_the_compiler_uses_exists_where_it_is_used():
    tree = ast.parse((ROOT / "builders/compile_child.py").read_text())
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root = node.value
            while isinstance(root, ast.Attribute | ast.Call):
                root = root.value if isinstance(root, ast.Attribute) else root.func
            if isinstance(root, ast.Name) and root.id in OBJECTS:
                used.add(node.attr)
    used = {name for name in used if not name.startswith("__")} - RTX_ALONE
    assert {"set_memory_pool_limit", "create_timing_cache", "STRONGLY_TYPED"} <= used
    found = json.loads((ROOT / "tests/data/tensorrt_builder_api.json").read_text())
    for version, names in found["versions"].items():
        missing = used - set(names)
        if tuple(map(int, version.split(".")[:2])) < (10, 13):
            missing -= FROM_10_13
        assert not missing, f"TensorRT {version} has no {sorted(missing)}"


class Settings:
    """A builder's config that notes what it is told."""

    def __init__(self, refuses: bool = False) -> None:
        self.told, self.refuses, self.max_aux_streams = [], refuses, None

    def set_memory_pool_limit(self, pool, size):
        self.told.append((pool, size))

    def create_timing_cache(self, known):
        return known

    def set_timing_cache(self, cache, ignore_mismatch):
        self.told.append((cache, ignore_mismatch))
        return not (self.refuses and cache)

    def get_timing_cache(self):
        return SimpleNamespace(serialize=lambda: b"timed")


def test_what_a_boards_compiler_is_told(tmp_path):
    trt = SimpleNamespace(MemoryPoolType=SimpleNamespace(WORKSPACE="workspace"))
    cache = tmp_path / "timing.cache"
    job = {"workspace": 64 << 20, "timing_cache": str(cache)}
    config = Settings()
    compile_child.use_board_settings(trt, config, job)
    assert config.told == [("workspace", 64 << 20), (b"", False)] and config.max_aux_streams == 0
    compile_child.keep_timings(config, cache)
    assert cache.read_bytes() == b"timed" and os.listdir(tmp_path) == ["timing.cache"]
    other = Settings(refuses=True)
    compile_child.use_board_settings(trt, other, job)
    assert other.told[1:] == [(b"timed", False), (b"", False)]


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="needs Linux's /proc")
def test_the_compiler_goes_first_where_memory_runs_out():
    code = "from builders.compile_child import *; die_first()"
    code += "; print(open('/proc/self/oom_score_adj').read())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "1000"
