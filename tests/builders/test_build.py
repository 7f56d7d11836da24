"""From a checkpoint to a bundle: what is refused, what is left behind, what the report says."""

import errno
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import KINDS, random_model, save_checkpoint

from builders.build import BuildOptions, build, prepare
from builders.graph import Graph
from edgevlm.bundle import open_bundle
from edgevlm.errors import BuildError, OverBudget, UnsupportedCheckpoint
from edgevlm.vlm import VLM

SMALL = {"max_seq_len": 64, "max_prefill_chunk": 16, "reference": False}
LOOP = """
import sys
from builders.build import BuildOptions, build
print("ready", flush=True)
build(sys.argv[1], sys.argv[2], BuildOptions(max_seq_len=64, reference=False, force=True))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    save_checkpoint(random_model(KINDS["qwen2_vl"]), KINDS["qwen2_vl"], path)
    return path


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A checkpoint of one's own, to damage."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    for file in checkpoint.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def entries(path):
    return sorted(p.name for p in path.iterdir())


def test_a_bundle_and_nothing_else(checkpoint, tmp_path):
    told = []
    options = BuildOptions(**SMALL, max_pixels=6272, max_images=2, slots=2)
    bundle = build(checkpoint, tmp_path / "out", options, progress=lambda *step: told.append(step))
    assert entries(tmp_path) == ["out"]
    manifest = open_bundle(tmp_path / "out").manifest
    assert manifest == bundle.manifest
    limits = manifest.limits
    assert (limits.max_seq_len, limits.slots, limits.max_images) == (64, 2, 2)
    assert limits.max_pixels == manifest.model.image_processor.max_pixels == 6272
    assert sorted(manifest.phases) == ["decode", "prefill", "vision"]
    assert sorted(manifest.files) == entries(tmp_path / "out")[1:]
    engines = manifest.build["engines"]
    assert engines["llm"]["packed_int4_bytes"] > 0
    assert engines["vision"]["packed_int4_bytes"] == 0
    assert sorted(manifest.build["peaks"]) == ["builder", "self_check"]
    for engine in engines.values():
        assert engine["peak_bytes"] <= manifest.build["peaks"]["builder"]
    scratch = max(engine["scratch_bytes"] for engine in engines.values())
    assert scratch == manifest.plan.pool("activations").bytes
    stages = [stage for stage, _, _ in told]
    assert stages[0] == "reading" and stages[-1] == "checking"
    assert all(done <= total for _, done, total in told)


def test_what_stays_16_bit_is_listed_with_its_reason(checkpoint, tmp_path):
    bundle = build(checkpoint, tmp_path / "out", BuildOptions(**SMALL))
    kept = {entry["name"]: entry["reason"] for entry in bundle.manifest.build["kept_16bit"]}
    assert "looked up" in kept["model.embed_tokens.weight"]
    assert "visual.*" in kept
    assert all(kept.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_seq_len": 5000}, "--max-seq-len is 5,000; this model takes from 16 to 4,096"),
        ({"max_seq_len": 4}, "--max-seq-len is 4"),
        ({"slots": 0}, "--slots is 0"),
        ({"max_prefill_chunk": 0}, "--max-prefill-chunk is 0"),
        ({"max_images": 0}, "--max-images is 0"),
        ({"max_pixels": 100}, "--max-pixels is 100"),
        ({"max_pixels": 10**9}, "--max-pixels is 1,000,000,000"),
        ({"target": "orin"}, "no target 'orin'"),
        ({"lowering": "classic"}, "no lowering 'classic'"),
    ],
)
def test_options_that_cannot_be_honoured(checkpoint, tmp_path, options, words):
    with pytest.raises(BuildError, match=words) as caught:
        build(checkpoint, tmp_path / "out", BuildOptions(**options))
    assert "\n" not in str(caught.value)
    assert entries(tmp_path) == []


def test_image_options_of_a_text_model(tmp_path):
    save_checkpoint(random_model(KINDS["llama"]), KINDS["llama"], tmp_path / "llama")
    with pytest.raises(BuildError, match="reads text only"):
        prepare(tmp_path / "llama", BuildOptions(max_images=1))


def test_over_budget_is_refused_before_any_work(checkpoint, tmp_path):
    needed = prepare(checkpoint, BuildOptions(**SMALL)).plan.total_bytes
    fixed = {**SMALL, "max_pixels": 6272}
    with pytest.raises(OverBudget, match="bytes"):
        build(checkpoint, tmp_path / "out", BuildOptions(**fixed, memory_budget=1000))
    assert entries(tmp_path) == []
    build(checkpoint, tmp_path / "out", BuildOptions(**SMALL, memory_budget=needed))


def test_a_damaged_checkpoint_leaves_nothing_behind(copy, tmp_path):
    shard = next(copy.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UnsupportedCheckpoint):
        build(copy, tmp_path / "out", BuildOptions(**SMALL))
    assert entries(tmp_path) == ["checkpoint"]


def test_a_bad_value_found_half_way_leaves_nothing_behind(copy, tmp_path):
    shard = next(copy.glob("*.safetensors"))
    tensors = load_file(shard)
    name = next(n for n in tensors if n.endswith("layers.1.mlp.down_proj.weight"))
    tensors[name][3, 5] = float("nan")
    save_file(tensors, shard)
    with pytest.raises(UnsupportedCheckpoint, match="layers.1.mlp.down_proj.weight"):
        build(copy, tmp_path / "out", BuildOptions(**SMALL))
    assert entries(tmp_path) == ["checkpoint"]


def test_a_bundle_that_does_not_answer_is_not_published(copy, tmp_path):
    shard = next(copy.glob("*.safetensors"))
    tensors = load_file(shard)
    name = next(
        n for n in tensors if n in ("model.norm.weight", "model.language_model.norm.weight")
    )
    tensors[name][:] = 3e38  # finite, and every logit is beyond fp32
    save_file(tensors, shard)
    with pytest.raises(BuildError, match="built but does not run"):
        build(copy, tmp_path / "out", BuildOptions(**SMALL, weights="fp32"))
    assert entries(tmp_path) == ["checkpoint"]


def test_a_disk_that_fills_up_leaves_the_old_bundle(checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "out"
    old = build(checkpoint, out, BuildOptions(**SMALL)).manifest

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Graph, "save", full)
    with pytest.raises(BuildError, match="is full"):
        build(checkpoint, out, BuildOptions(**SMALL, force=True))
    assert open_bundle(out).manifest == old
    assert entries(tmp_path) == ["out"]


def test_kill_at_any_point_leaves_the_old_bundle(checkpoint, tmp_path):
    out = tmp_path / "out"
    old = build(checkpoint, out, BuildOptions(**SMALL)).manifest
    rng = random.Random(5)
    killed = 0
    for _ in range(4):
        command = [sys.executable, "-c", LOOP, str(checkpoint), str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.6))
            child.send_signal(signal.SIGKILL)
            killed += child.wait() == -signal.SIGKILL
        manifest = open_bundle(out).manifest  # whole: every hash is checked
        assert manifest.model == old.model
    assert killed > 0
    build(checkpoint, out, BuildOptions(**SMALL, force=True))
    assert entries(tmp_path) == ["out"]
    with VLM(out) as vlm:
        assert vlm.generate("hello").finish_reason in ("stop", "length")
