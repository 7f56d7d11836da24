"""Presets are held to what was published: config.json files and the hub's parameter counts."""

import json
from pathlib import Path

import pytest

from builders.models import FAMILIES
from builders.presets import NOT_YET, PRESETS, find_model, parameters, smaller_models
from edgevlm.errors import UnsupportedCheckpoint

PUBLISHED = Path(__file__).parent / "published"


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert parameters(find_model(name).config) == PRESETS[name].parameters


@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "qwen2-vl-2b", "qwen2.5-0.5b", "qwen2.5-vl-3b", "smollm2-135m"]
)
def test_a_preset_is_what_its_config_json_says(name: str) -> None:
    raw = json.loads((PUBLISHED / f"{name}.json").read_text())
    preprocessor = None
    if "vl" in name:
        preprocessor = json.loads((PUBLISHED / "qwen2-vl-preprocessor.json").read_text())
    read = FAMILIES[raw["model_type"]].read_config(raw, {}, preprocessor, ())
    assert find_model(name).config == read


def test_a_config_json_and_its_directory_need_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((PUBLISHED / "qwen2-vl-2b.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(
        (PUBLISHED / "qwen2-vl-preprocessor.json").read_text()
    )
    (tmp_path / "tokenizer.json").write_text("x" * 1000)
    for path in (tmp_path, tmp_path / "config.json"):
        found = find_model(str(path))
        assert found.config == find_model("qwen2-vl-2b").config
        assert found.tokenizer_bytes == 1000


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2-VL-2B-Instruct", "qwen2-vl-2b", "QWEN2-VL-2B", "Qwen2-VL-2B-Instruct"]
)
def test_hub_names_are_understood(name: str) -> None:
    assert find_model(name).name == "qwen2-vl-2b"


@pytest.mark.parametrize("name", [*NOT_YET, "InternVL2-8B", "openbmb/MiniCPM-V-2_6"])
def test_families_to_come_are_refused_as_such(name: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="not supported yet.*qwen2-vl-2b"):
        find_model(name)


@pytest.mark.parametrize("name", ["gpt-5", "", "./nowhere", "nowhere/config.json"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="neither a preset|does not exist"):
        find_model(name)


def test_smaller_models_come_from_the_family_largest_first() -> None:
    names = [m.name for m in smaller_models(find_model("qwen2.5-7b").config)]
    assert names == ["qwen2.5-3b", "qwen2.5-1.5b", "qwen2.5-0.5b"]
    assert not smaller_models(find_model("qwen2-vl-2b").config)
