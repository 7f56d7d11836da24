"""Config data survives JSON and refuses what it does not know."""

import pytest

from edgevlm.config import (
    GenerationDefaults,
    Limits,
    Llama3RopeScaling,
    RopeConfig,
    VisionConfig,
    from_dict,
    to_dict,
)

ROPE = RopeConfig(1e6, "mrope", (16, 24, 24), Llama3RopeScaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(
    "value",
    [
        ROPE,
        RopeConfig(10000.0),
        GenerationDefaults((1, 2), temperature=0.7, top_k=20),
        Limits(4096, 256, 1, 4, 1003520),
        VisionConfig("qwen2_5_vl", 2, 64, 4, 96, 64, "silu", 3, 14, 2, 2, 112, (1,)),
    ],
)
def test_round_trip(value):
    assert from_dict(type(value), to_dict(value)) == value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"theta": "big"}, "RopeConfig.theta is 'big', not float"),
        ({"theta": True}, "RopeConfig.theta is True, not float"),
        ({"scheme": "yarn"}, "RopeConfig.scheme is 'yarn', not one of 'plain', 'mrope'"),
        ({"mrope_section": 16}, "RopeConfig.mrope_section is int, not a list"),
        ({"mrope_section": [1.5]}, "mrope_section\\[0\\] is 1.5, not int"),
        ({"scaling": {"factor": 8.0}}, "RopeConfig.scaling: .*missing"),
        ({"beta": 1}, "RopeConfig has unknown field 'beta'"),
    ],
)
def test_wrong_fields_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        from_dict(RopeConfig, to_dict(ROPE) | change)


def test_missing_field_is_named():
    data = to_dict(Limits(1, 1, 1))
    del data["slots"]
    with pytest.raises(ValueError, match="Limits: .*slots"):
        from_dict(Limits, data)


def test_vision_sizes_by_hand():
    vision = VisionConfig("qwen2_vl", 32, 1280, 16, 5120, 1536, "quick_gelu", 3, 14, 2, 2)
    assert vision.head_dim == 80
    assert vision.patch_dim == 3 * 2 * 14 * 14
