"""A bundle that is not the one that was built is refused with one sentence."""

import json

import pytest

from edgevlm import bundle as bundle_module
from edgevlm.bundle import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    StageSpec,
    TensorSpec,
    open_bundle,
    record,
    write_manifest,
)
from edgevlm.config import Limits
from edgevlm.errors import BundleError
from edgevlm.memory_plan import MemoryPlan, Pool


@pytest.fixture
def built(tmp_path, text_config):
    path = tmp_path / "bundle"
    path.mkdir()
    (path / "llm.onnx").write_bytes(bytes(range(256)) * 5000)
    (path / "tokenizer.json").write_text("{}")
    spec = TensorSpec("x", "float32", ("batch_size", 4), "x", "row")
    manifest = Manifest(
        version=FORMAT_VERSION,
        edgevlm="0",
        target="host",
        executor="host",
        lowering="host",
        weights="int4",
        model=text_config,
        special_tokens={"eos_token": "<|im_end|>"},
        phases={"prefill": (StageSpec("llm.onnx", (spec,), ()),)},
        plan=MemoryPlan(Limits(64, 16, 1), (Pool("io", 0, ""),), ()),
        build={"seconds": 1.5},
        files={name: record(path / name) for name in ("llm.onnx", "tokenizer.json")},
    )
    write_manifest(path, manifest)
    return path, manifest


def test_a_whole_bundle_opens_as_it_was_written(built):
    path, manifest = built
    assert open_bundle(path).manifest == manifest
    assert open_bundle(str(path)).manifest.limits == Limits(64, 16, 1)


def test_record_is_sha256(tmp_path):
    # sha256 of "abc", FIPS 180-2 appendix B.1
    (tmp_path / "abc").write_bytes(b"abc")
    found = record(tmp_path / "abc")
    assert found.bytes == 3
    assert found.sha256.startswith("ba7816bf8f01cfea414140de5dae2223")
    assert found.sha256.endswith("b410ff61f20015ad")


def test_record_without_file_digest(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(3_000_000))
    expected = record(tmp_path / "x")
    monkeypatch.delattr(bundle_module.hashlib, "file_digest", raising=False)  # Python 3.10
    assert record(tmp_path / "x") == expected


def damage_missing(path):
    (path / "llm.onnx").unlink()


def damage_cut(path):
    file = path / "llm.onnx"
    file.write_bytes(file.read_bytes()[:-1])


def damage_flipped(path):
    data = bytearray((path / "llm.onnx").read_bytes())
    data[640_000] ^= 1
    (path / "llm.onnx").write_bytes(data)


def damage_directory(path):
    (path / "llm.onnx").unlink()
    (path / "llm.onnx").mkdir()


def damage_version(path):
    edit(path, version=FORMAT_VERSION + 1)


def damage_manifest(path):
    (path / MANIFEST).write_text((path / MANIFEST).read_text()[:-40])


def damage_list(path):
    (path / MANIFEST).write_text("[]")


def damage_binary(path):
    (path / MANIFEST).write_bytes(b"\xff\xfe\x00")


def damage_field(path):
    edit(path, weights=4)


def damage_no_manifest(path):
    (path / MANIFEST).unlink()


def edit(path, **changes):
    data = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(data | changes))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_missing, "llm.onnx is missing"),
        (damage_cut, "has 1,279,999 bytes, the build wrote 1,280,000"),
        (damage_flipped, "llm.onnx is damaged: its SHA-256"),
        (damage_directory, "llm.onnx is missing"),
        (damage_version, f"bundle format {FORMAT_VERSION + 1}; this edgevlm reads"),
        (damage_manifest, "bundle.json cannot be read"),
        (damage_list, "bundle format None"),
        (damage_binary, "bundle.json cannot be read"),
        (damage_field, "Manifest.weights is 4, not str"),
        (damage_no_manifest, "has no bundle.json"),
    ],
)
def test_a_damaged_bundle_is_refused(built, damage, words):
    path, _ = built
    damage(path)
    with pytest.raises(BundleError, match=words) as caught:
        open_bundle(path)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(BundleError, match="no such directory"):
        open_bundle(tmp_path / "nothing")


def test_a_file_is_no_bundle(tmp_path):
    (tmp_path / "model.gguf").write_text("GGUF")
    with pytest.raises(BundleError, match="is not a bundle"):
        open_bundle(tmp_path / "model.gguf")


def test_sizes_are_compared_even_without_the_check(built):
    path, _ = built
    damage_flipped(path)
    open_bundle(path, check=False)
    damage_cut(path)
    with pytest.raises(BundleError):
        open_bundle(path, check=False)
