"""Configs of qwen3, qwen3_vl and internlm2: what is read, what is refused, where tensors lie."""

import copy
import json

import numpy as np
import pytest

from builders.checkpoint import canonical_name
from builders.models import FAMILIES, family_of
from builders.presets import PRESETS, find_model
from edgevlm.config import RopeConfig, from_dict, to_dict
from edgevlm.errors import UnsupportedCheckpoint

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
INTERNLM2 = {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 92544,
}


def read(config, preprocessor=None):
    return family_of(config).read_config(copy.deepcopy(config), {}, preprocessor, ())


def refused(config, *words):
    with pytest.raises(UnsupportedCheckpoint) as caught:
        read(config)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_qwen3_norms_its_heads_whose_width_is_its_own():
    text = read(QWEN3).text
    assert (text.head_dim, text.qk_norm, text.attention_bias) == (128, True, False)
    assert text.rope == RopeConfig(1e6)
    shapes = FAMILIES["qwen3"].tensor_shapes(read(QWEN3))
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (128,)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (2048, 1024)
    without = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert read(without).text.head_dim == 128  # not hidden_size / num_attention_heads


def test_qwen3_tensors_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    config = QWEN3 | {"num_hidden_layers": 1, "max_window_layers": 1}
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    del expected["lm_head.weight"]
    assert FAMILIES["qwen3"].tensor_shapes(read(config)) == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"attention_bias": True}, ("attention_bias true",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("rope_type 'yarn'",)),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}, ("4096",)),
    ],
)
def test_what_qwen3_cannot_have_is_refused(values, words):
    refused(QWEN3 | values, *words)


def within(section, **values):
    return QWEN3_VL | {section: QWEN3_VL[section] | values}


def test_qwen3_vl_4b():
    config = read(QWEN3_VL, PRESETS["qwen3-vl-4b"].preprocessor)
    assert config == find_model("qwen3-vl-4b").config
    assert config.text.rope == RopeConfig(5e6, "mrope_interleaved", (24, 20, 20))
    assert (config.text.deepstack, config.text.qk_norm) == (3, True)
    assert config.vision.deepstack_visual_indexes == (5, 11, 17)
    assert (config.vision.num_position_embeddings, config.vision.hidden_act) == (
        2304, "gelu_pytorch_tanh",
    )  # fmt: skip
    processor = config.image_processor
    assert (processor.patch_size, processor.min_pixels, processor.max_pixels) == (
        16, 65536, 16777216,
    )  # fmt: skip
    assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config


def test_qwen3_vl_tensors_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    config = within("text_config", num_hidden_layers=3)
    config["vision_config"] = QWEN3_VL["vision_config"] | {
        "depth": 3, "deepstack_visual_indexes": [2, 0],
    }  # fmt: skip
    theirs = transformers.Qwen3VLConfig(**copy.deepcopy(config))
    assert read(json.loads(json.dumps(theirs.to_dict()))) == read(config)
    with torch.device("meta"):
        model = transformers.Qwen3VLForConditionalGeneration(theirs)
    expected = {canonical_name(n): tuple(p.shape) for n, p in model.state_dict().items()}
    del expected["lm_head.weight"]
    family, ours = FAMILIES["qwen3_vl"], read(config)
    places = family.stored(ours)
    found = {
        places[name].name if name in places else name: shape
        for name, shape in family.tensor_shapes(ours).items()
    }
    assert found == expected


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("text_config", {"attention_bias": True}, ("attention_bias true",)),
        ("text_config", {"rope_scaling": None}, ("mrope_section",)),
        (
            "text_config",
            {"rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": False}},
            ("mrope_interleaved false", "true"),
        ),
        ("vision_config", {"deepstack_visual_indexes": [5, 24]}, ("[5, 24]", "24")),
        ("vision_config", {"deepstack_visual_indexes": [5, 5]}, ("[5, 5]", "different")),
        ("vision_config", {"num_position_embeddings": 2300}, ("2300", "square")),
        ("vision_config", {"hidden_act": "silu"}, ("hidden_act 'silu'",)),
        ("vision_config", {"rope_parameters": {"rope_theta": 500.0}}, ("rope_theta 500.0",)),
        ("vision_config", {"out_hidden_size": 2048}, ("2048", "2560")),
    ],
)
def test_what_qwen3_vl_cannot_have_is_refused(section, values, words):
    refused(within(section, **values), *words)


def test_more_features_than_layers_are_refused():
    refused(within("text_config", num_hidden_layers=2), "deepstack_visual_indexes", "2")


def test_dynamic_scaling_never_acts_within_the_context():
    """It begins beyond max_position_embeddings, which no bundle goes beyond."""
    assert read(INTERNLM2).text.rope == RopeConfig(1e6)
    assert read(INTERNLM2 | {"rope_scaling": None}) == read(INTERNLM2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"bias": True}, ("bias true",)),
        ({"bias": None}, ("bias true",)),  # the published class has a bias where nothing is said
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("'linear'", "'dynamic'")),
        ({"hidden_act": "gelu"}, ("hidden_act 'gelu'",)),
    ],
)
def test_what_internlm2_cannot_have_is_refused(values, words):
    refused(INTERNLM2 | values, *words)


def test_fused_rows_of_internlm2_go_by_group_of_heads():
    config = read(
        INTERNLM2 | {"hidden_size": 16, "num_attention_heads": 4} | {"num_key_value_heads": 2}
    )
    places = FAMILIES["internlm2"].stored(config)
    at = "model.layers.3.self_attn."
    rows = {part: places[f"{at}{part}_proj.weight"].rows for part in "qkv"}
    # two groups of two q heads, a k and a v, four rows each
    assert rows["q"].tolist() == [*range(8), *range(16, 24)]
    assert rows["k"].tolist() == [8, 9, 10, 11, 24, 25, 26, 27]
    assert rows["v"].tolist() == [12, 13, 14, 15, 28, 29, 30, 31]
    stored = np.arange(32)[:, None] * np.ones(16)
    assert places[f"{at}k_proj.weight"].take(stored)[0, 0] == 8
    assert places[f"{at}q_proj.weight"].shape == stored.shape
    assert {place.name for place in places.values()} >= {
        "model.tok_embeddings.weight", "output.weight", "model.layers.3.feed_forward.w2.weight",
    }  # fmt: skip


def test_a_missing_or_misshapen_fused_tensor_is_named_as_the_file_has_it(tiny, tmp_path):
    from safetensors.numpy import load_file, save_file

    from builders.checkpoint import Checkpoint

    whole = tiny.get("internlm2").checkpoint
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(whole / "model.safetensors")
    name = "model.layers.1.attention.wqkv.weight"
    assert Checkpoint(whole).bytes == sum(value.nbytes for value in tensors.values())
    save_file(tensors | {name: tensors[name][:-1]}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=f"'{name}' has shape"):
        Checkpoint(tmp_path)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=f"no '{name}', which internlm2 needs"):
        Checkpoint(tmp_path)
