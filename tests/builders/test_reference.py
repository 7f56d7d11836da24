"""Fixed prompts and the logits of the checkpoint: how they are made, and when they are not."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tiny_models import KINDS, LIMITS, random_model, save_checkpoint

from builders import reference as module
from builders.blocks import WeightPolicy
from builders.build import BuildOptions, build
from builders.checkpoint import Checkpoint
from builders.reference import Rounded, Setting, drawing, make_reference
from edgevlm.bundle import Bundle, open_bundle, record
from edgevlm.device import Machine
from edgevlm.errors import BuildError
from edgevlm.meminfo import Memory
from edgevlm.reference import read_reference

PLENTY = Machine(memory=Memory(available=64 << 30))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, its checkpoint and a bundle with a reference."""
    path = tmp_path_factory.mktemp("reference")
    kind = KINDS["qwen2_5_vl-tied"]
    model = random_model(kind)
    save_checkpoint(model, kind, path / "checkpoint")
    bundle = build(path / "checkpoint", path / "out", BuildOptions(weights="int4", **LIMITS))
    return model, path / "checkpoint", bundle


@pytest.fixture
def setting(made, tmp_path) -> Setting:
    """What make_reference takes, in a directory with the text side only."""
    _, checkpoint, bundle = made
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes(bundle.file(name).read_bytes())
    manifest = bundle.manifest
    return Setting(
        Checkpoint(checkpoint),
        manifest.model,
        WeightPolicy("int4", 128),
        manifest.limits.max_seq_len,
        manifest.special_tokens,
        tmp_path,
        True,
    )


def test_text_and_pictures_with_logits(made):
    reference = read_reference(open_bundle(made[2].path))
    assert [case.picture is not None for case in reference.cases] == [False, False, True, True]
    assert reference.made and made[2].manifest.build["reference"] == "made"
    assert sorted(made[2].manifest.build["peaks"]) == ["builder", "reference", "self_check"]
    for case in reference.cases:
        assert len(case.answer) == case.steps == 8
        assert case.logits.shape == case.rounded.shape == (9, 288)
        assert (case.features is not None) == (case.picture is not None)
    assert not list(made[2].path.glob("reference.tmp"))


def test_the_logits_are_those_of_transformers(made):
    """The oracle that knows nothing of ours."""
    import torch

    model = made[0]
    case = read_reference(open_bundle(made[2].path)).cases[0]
    ids = np.concatenate([case.ids, case.answer])
    with torch.no_grad():
        row = torch.from_numpy(ids)[None]
        logits = model(input_ids=row, mm_token_type_ids=torch.zeros_like(row).int()).logits[0]
    wanted = logits[len(case.ids) - 1 :].numpy()
    assert np.abs(case.logits - wanted).max() <= 2e-3 * np.abs(wanted).max()


def test_rounded_weights_are_what_the_codes_stand_for(made):
    source = Checkpoint(made[1])
    rounded = Rounded(source, WeightPolicy("int4", 32))
    name = "model.layers.0.mlp.gate_proj.weight"
    plain, found = source.tensor(name), rounded.tensor(name)
    assert rounded.shape(name) == plain.shape == found.shape
    assert 0 < np.abs(found - plain).max() < np.abs(plain).max() / 7
    for same in ("model.norm.weight", "visual.blocks.0.attn.qkv.weight"):
        assert np.array_equal(source.tensor(same), rounded.tensor(same))


def test_drawings_are_always_the_same():
    assert drawing(0).tobytes() == drawing(0).tobytes() != drawing(1).tobytes()


@pytest.mark.parametrize(
    ("memory", "words"), [(1 << 20, "not made: needs"), (None, "0 can be had")]
)
def test_where_it_does_not_fit_the_prompts_are_kept_with_the_reason(setting, memory, words):
    machine = Machine(memory=Memory(available=memory))
    assert words in make_reference(setting, machine, True).reason
    assert [p.name for p in setting.directory.glob("reference*")] == ["reference.npz"]


def test_a_large_model_of_this_machine_and_a_wish_for_none(setting, monkeypatch):
    assert "--no-reference" in make_reference(setting, PLENTY, False).reason
    monkeypatch.setattr(module, "HOST_LIMIT", 1000)
    assert "more than 1,000" in make_reference(setting, PLENTY, True).reason


def test_prompts_that_are_too_long_are_left_out(setting):
    short = dataclasses.replace(setting, max_seq_len=60)
    reference = module.write_cases(short, "why")
    assert 0 < len(reference.cases) < 4
    assert all(len(case.ids) + case.steps <= 60 for case in reference.cases)
    with pytest.raises(BuildError, match="too short"):
        make_reference(dataclasses.replace(setting, max_seq_len=5), PLENTY, False)


def test_the_reference_is_part_of_what_is_hashed(made):
    assert "reference.npz" in open_bundle(made[2].path).manifest.files
    assert Path(made[2].path, "reference.npz").stat().st_size < 2 << 20


def test_a_model_run_in_pieces_says_what_it_says_whole(made, setting, monkeypatch):
    """A stage for each layer, loaded when it is run and let go before the next."""
    monkeypatch.setattr(module, "STAGE_BYTES", 1)
    monkeypatch.setattr(module, "MIN_RESIDENT_BYTES", 0)
    assert make_reference(setting, PLENTY, True).peak_rss_bytes > 0
    whole = read_reference(open_bundle(made[2].path))
    manifest = dataclasses.replace(
        made[2].manifest, files={"reference.npz": record(setting.directory / "reference.npz")}
    )
    pieces = read_reference(Bundle(setting.directory, manifest))
    for a, b in zip(whole.cases, pieces.cases, strict=True):
        assert np.array_equal(a.answer, b.answer)
        assert np.abs(a.logits - b.logits).max() <= 2e-3 * np.abs(a.logits).max()
        assert np.abs(a.rounded - b.rounded).max() <= 2e-3 * np.abs(a.rounded).max()
        assert a.features is None or np.allclose(a.features, b.features, atol=2e-3)
