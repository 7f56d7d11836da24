"""A bundle against its reference: whole ones pass, every kind of damage is found."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tiny_models import KINDS, LIMITS, random_model, save_checkpoint

from builders.build import BuildOptions, build
from builders.run_check import check_bundle
from edgevlm import verify as module
from edgevlm.bundle import (
    LLM_GRAPH,
    REFERENCE,
    open_bundle,
    read_manifest,
    record,
    write_manifest,
)
from edgevlm.cli import main
from edgevlm.errors import BuildError, BundleError
from edgevlm.reference import read_reference, sampled_ids, write_reference
from edgevlm.verify import THRESHOLDS, Thresholds, cosines, verify


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """A bundle with a reference, by its weights."""
    path = tmp_path_factory.mktemp("verify")
    save_checkpoint(random_model(KINDS["qwen2_vl"]), KINDS["qwen2_vl"], path / "checkpoint")
    made = {}
    for weights in ("fp32", "int4"):
        options = BuildOptions(weights=weights, **LIMITS)
        made[weights] = build(path / "checkpoint", path / weights, options)
    return made


@pytest.fixture
def copy(bundles, tmp_path):
    """A bundle of one's own, to damage."""

    def made(weights: str) -> Path:
        out = tmp_path / weights
        out.mkdir()
        for file in bundles[weights].path.iterdir():
            (out / file.name).write_bytes(file.read_bytes())
        return out

    return made


def damaged(path: Path, name: str, change) -> Path:
    """Change one initializer and make the manifest agree, as a bug of a builder would."""
    graph = onnx.load(path / LLM_GRAPH, load_external_data=False)
    (tensor,) = [t for t in graph.graph.initializer if t.name == name]
    values = numpy_helper.to_array(tensor).copy()
    change(values)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(graph, path / LLM_GRAPH)
    return hashed_again(path)


def hashed_again(path: Path) -> Path:
    manifest = read_manifest(path)
    files = {name: record(path / name) for name in manifest.files}
    write_manifest(path, dataclasses.replace(manifest, files=files))
    return path


def status(found) -> dict[str, str]:
    return {check.name: check.status for check in found.checks}


@pytest.mark.parametrize("weights", ["fp32", "int4"])
def test_a_whole_bundle_passes(bundles, weights):
    found = verify(bundles[weights].path, threads=1)
    assert not found.failed
    names = {"finite logits", "vision cosine", "prefill cosine", "decode cosine", "top-1 agreement"}
    assert names <= set(status(found))
    assert ("quantisation" in status(found)) == (weights == "int4")
    assert found.figures["allocations_after_start"] == 0
    assert {"load_ms", "vision_ms", "prefill_ms", "decode_ms"} == set(found.figures["timings"])
    assert bundles[weights].manifest.files[REFERENCE].bytes < 2 << 20


def test_two_swapped_rows_are_found_and_not_published(copy):
    def swap(values):
        values[[3, 40]] = values[[40, 3]]

    path = damaged(copy("fp32"), "/layers.1/mlp/down_proj/weight", swap)
    assert status(verify(path, threads=1))["prefill cosine"] == "fail"
    with pytest.raises(BuildError, match=r"cosine: found 0\.\d+; needed at least 0.9999"):
        check_bundle(path)


@pytest.mark.parametrize("name", ["/layers.0/mlp/down_proj/scales", "/lm_head/scales"])
def test_a_flipped_scale_of_an_int4_bundle_is_found(copy, name):
    path = damaged(copy("int4"), name, lambda values: np.negative(values, out=values))
    failed = {check.name for check in verify(path, threads=1).failed}
    assert {"prefill cosine", "top-1 agreement"} <= failed


def test_a_bundle_whose_logits_are_not_finite_fails(copy):
    path = damaged(copy("fp32"), "/norm/weight", lambda values: values.fill(np.nan))
    assert status(verify(path, threads=1))["finite logits"] == "fail"


def test_the_threshold_is_enforced(bundles, monkeypatch):
    """What just passed fails where a little more is asked for."""
    limit = verify(bundles["int4"].path, threads=1)
    found = {c.name: float(c.found) for c in limit.checks if "cosine" in c.name}
    worst = found["decode cosine"]
    assert THRESHOLDS["int4"].cosine <= worst < 1
    monkeypatch.setitem(module.THRESHOLDS, "int4", Thresholds(worst + 1e-4, 0.8))
    failed = [c.name for c in verify(bundles["int4"].path, threads=1).failed]
    assert "decode cosine" in failed


def test_without_logits_the_prompts_run_all_the_same(copy):
    path = copy("fp32")
    reference = read_reference(open_bundle(path))
    bare = [dataclasses.replace(c, answer=np.empty(0, np.int64)) for c in reference.cases]
    write_reference(
        path / REFERENCE, dataclasses.replace(reference, cases=tuple(bare), made=None, reason="why")
    )
    found = verify(hashed_again(path), threads=1)
    assert status(found) == {
        "finite logits": "ok",
        "reference": "warn",
        "allocations after start": "ok",
    }


def test_a_bundle_of_an_earlier_edgevlm_has_no_reference(copy):
    path = copy("fp32")
    manifest = read_manifest(path)
    files = {name: r for name, r in manifest.files.items() if name != REFERENCE}
    write_manifest(path, dataclasses.replace(manifest, files=files))
    with pytest.raises(BundleError, match="has no reference.npz"):
        verify(path)


def test_cosines_are_about_the_mean_and_refuse_nan():
    wanted = np.array([[1.0, 2.0, 4.0]])
    assert cosines(wanted + 1000, wanted)[0] == pytest.approx(1)
    assert cosines(-wanted, wanted)[0] == pytest.approx(-1)
    assert cosines(wanted * np.nan, wanted)[0] == 0
    assert cosines(np.ones((1, 3)), wanted)[0] == 0


@pytest.mark.parametrize(("vocab", "kept"), [(288, 288), (151_936, 3999)])
def test_large_vocabularies_are_sampled(vocab, kept):
    assert len(sampled_ids(vocab)) == kept


def test_the_command_and_its_report(copy, tmp_path, capsys):
    path, report = copy("fp32"), tmp_path / "report.json"
    assert main(["verify", str(path), "--json", "--report", str(report)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] and {"name", "status", "found", "needed", "remedy"} == set(
        document["checks"][0]
    )
    written = json.loads(report.read_text())
    assert {"machine", "machine_checks", "versions", "manifest", "checks"} <= set(written)
    damaged(path, "/norm/weight", lambda values: np.negative(values, out=values))
    assert main(["verify", str(path)]) == 1
    said = capsys.readouterr()
    assert "FAIL" in said.out and "does not answer as its checkpoint does" in said.err


def test_what_cannot_start_is_a_report_as_well(copy, tmp_path, capsys):
    path, report = copy("fp32"), tmp_path / "report.json"
    (path / LLM_GRAPH).write_bytes(b"")
    assert main(["verify", str(path), "--report", str(report)]) == 1
    assert "llm.onnx" in capsys.readouterr().err
    assert json.loads(report.read_text())["checks"][0]["name"] == "start"
