import copy
import json
from pathlib import Path

import pytest

from builders.models import FAMILIES, family_of
from edgevlm.config import (
    GenerationDefaults,
    ImageProcessorConfig,
    ImageTokens,
    Llama3RopeScaling,
    RopeConfig,
    from_dict,
    to_dict,
)
from edgevlm.errors import UnsupportedCheckpoint

HERE = Path(__file__).parent / "published"  # files of published checkpoints, field for field
QWEN2_VL_2B = json.loads((HERE / "qwen2-vl-2b.json").read_text())
QWEN2_5_VL_3B = json.loads((HERE / "qwen2.5-vl-3b.json").read_text())
QWEN2_5_0_5B = json.loads((HERE / "qwen2.5-0.5b.json").read_text())
SMOLLM2_135M = json.loads((HERE / "smollm2-135m.json").read_text())
LLAMA_3_2_1B = json.loads((HERE / "llama-3.2-1b.json").read_text())
PREPROCESSOR = json.loads((HERE / "qwen2-vl-preprocessor.json").read_text())
PUBLISHED = {
    "qwen2-vl-2b": QWEN2_VL_2B,
    "qwen2.5-vl-3b": QWEN2_5_VL_3B,
    "qwen2.5-0.5b": QWEN2_5_0_5B,
    "smollm2-135m": SMOLLM2_135M,
    "llama-3.2-1b": LLAMA_3_2_1B,
}
VLMS = [QWEN2_VL_2B, QWEN2_5_VL_3B]


def read(config, generation=None, preprocessor=None, eos=()):
    return family_of(config).read_config(config, generation or {}, preprocessor, eos)


def changed(config, section=None, drop=(), **values):
    """A copy with other values at the root, or in a section."""
    config = copy.deepcopy(config)
    place = config[section] if section else config
    place.update(values)
    for key in drop:
        del place[key]
    return config


def nested(config):
    """The same config as transformers 5 writes it."""
    transformers = pytest.importorskip("transformers", minversion="5")
    cls = {
        "qwen2_vl": transformers.Qwen2VLConfig,
        "qwen2_5_vl": transformers.Qwen2_5_VLConfig,
        "qwen2": transformers.Qwen2Config,
        "llama": transformers.LlamaConfig,
    }[config["model_type"]]
    return json.loads(json.dumps(cls(**copy.deepcopy(config)).to_dict()))


def refused(config, *words, **kwargs):
    with pytest.raises(UnsupportedCheckpoint) as caught:
        read(config, **kwargs)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_layouts_give_the_same_config(name):
    flat = PUBLISHED[name]
    deep = nested(flat)
    assert "rope_parameters" in (deep.get("text_config") or deep) and "torch_dtype" not in deep
    assert read(flat) == read(deep)


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_survives_its_own_json(name):
    config = read(PUBLISHED[name])
    assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config


def test_layout_of_transformers_4_5x_has_both():
    """4.52 wrote text_config beside the flat fields, rope_scaling with both kinds of type."""
    flat = QWEN2_VL_2B
    text = {key: flat[key] for key in flat if key not in ("vision_config", "architectures")}
    text |= {"model_type": "qwen2_vl_text", "image_token_id": None, "vision_end_token_id": None}
    text["rope_scaling"] = {"type": "default", "rope_type": "default"} | {
        "mrope_section": [16, 24, 24]
    }
    assert read(changed(flat, text_config=text, rope_scaling=None)) == read(flat)


def test_qwen2_vl_2b():
    config = read(QWEN2_VL_2B, preprocessor=PREPROCESSOR)
    assert config.text.rope == RopeConfig(1e6, "mrope", (16, 24, 24))
    assert (config.text.head_dim, config.text.num_key_value_heads) == (128, 2)
    assert config.text.tie_word_embeddings and config.text.attention_bias
    assert config.image_tokens == ImageTokens(151655, 151652, 151653)
    vision = config.vision
    assert (vision.hidden_size, vision.intermediate_size, vision.out_hidden_size) == (
        1280,
        5120,
        1536,
    )
    assert (vision.hidden_act, vision.window_size, vision.head_dim) == ("quick_gelu", None, 80)
    assert config.image_processor.max_pixels == 12845056


def test_qwen2_5_vl_3b():
    vision = read(QWEN2_5_VL_3B).vision
    assert (vision.hidden_size, vision.intermediate_size, vision.out_hidden_size) == (
        1280,
        3420,
        2048,
    )
    assert (vision.hidden_act, vision.window_size) == ("silu", 112)
    assert vision.fullatt_block_indexes == (7, 15, 23, 31)


def test_text_models():
    llama = read(LLAMA_3_2_1B)
    assert llama.text.rope == RopeConfig(500000.0, scaling=Llama3RopeScaling(32.0, 1.0, 4.0, 8192))
    assert (llama.text.head_dim, llama.text.attention_bias, llama.vision) == (64, False, None)
    assert llama.generation.eos_token_ids == (128001, 128008, 128009)
    assert read(SMOLLM2_135M).text.rope == RopeConfig(100000.0)
    qwen = read(QWEN2_5_0_5B)
    assert qwen.text.attention_bias and qwen.image_processor is None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2-vl-2b", 2_208_985_600),
        ("qwen2.5-vl-3b", 3_754_622_976),
        ("qwen2.5-0.5b", 494_032_768),
        ("smollm2-135m", 134_515_008),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_tensor_shapes_sum_to_the_published_size(name, parameters):
    config = read(PUBLISHED[name])
    total = 0
    for shape in FAMILIES[config.model_type].tensor_shapes(config).values():
        size = 1
        for axis in shape:
            size *= axis
        total += size
    assert total == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensor_shapes_are_those_of_transformers(name):
    """The oracle: the names and shapes of the model that transformers makes from the config."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    from builders.checkpoint import canonical_name

    flat = changed(PUBLISHED[name], num_hidden_layers=2, max_window_layers=2)
    if "vision_config" in flat:
        flat["vision_config"].update(depth=2)
        if flat["model_type"] == "qwen2_5_vl":
            flat["vision_config"].update(fullatt_block_indexes=[1])
    for tied in (True, False):
        flat["tie_word_embeddings"] = tied
        deep = nested(flat)
        cls = getattr(transformers, flat["architectures"][0])
        with torch.device("meta"):
            model = cls(cls.config_class.from_dict(deep))
        expected = {canonical_name(n): tuple(p.shape) for n, p in model.state_dict().items()}
        if tied:
            del expected["lm_head.weight"]
        config = read(flat)
        assert FAMILIES[config.model_type].tensor_shapes(config) == expected


def test_tie_flag_in_text_config_or_root():
    deep = nested(changed(QWEN2_VL_2B, tie_word_embeddings=False))
    assert not read(deep).text.tie_word_embeddings
    assert read(changed(deep, tie_word_embeddings=True)).text.tie_word_embeddings
    assert read(changed(deep, "text_config", tie_word_embeddings=True)).text.tie_word_embeddings
    assert not read(changed(deep, drop=["tie_word_embeddings"])).text.tie_word_embeddings


# --- stop set (CASES 39)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ([5, 3], 9, (7,), (3, 5, 7, 9)),
        (5, [9, 5], (), (5, 9)),
        (None, 9, (9,), (9,)),
        ("absent", None, (7,), (7,)),
        ([], [], (7,), (7,)),
        (0, "absent", (), (0,)),
    ],
)
def test_stop_set_is_the_union(generation, config, tokenizer, expected):
    raw = changed(SMOLLM2_135M, eos_token_id=config)
    if config == "absent":
        del raw["eos_token_id"]
    gen = {} if generation == "absent" else {"eos_token_id": generation}
    assert read(raw, gen, eos=tokenizer).generation.eos_token_ids == expected


def test_stop_set_reads_text_config_too():
    deep = nested(QWEN2_VL_2B)
    assert "eos_token_id" in deep["text_config"] and "eos_token_id" not in deep
    assert read(deep, {"eos_token_id": 151643}).generation.eos_token_ids == (151643, 151645)


def test_no_stop_token_at_all_is_said(caplog):
    assert not read(changed(SMOLLM2_135M, eos_token_id=None)).generation.eos_token_ids
    assert "max_tokens" in caplog.text


@pytest.mark.parametrize("value", ["</s>", [1, "2"], -1, True, 1.5])
def test_bad_stop_token_is_refused(value):
    refused(SMOLLM2_135M, "eos_token_id", generation={"eos_token_id": value})


def test_generation_defaults():
    generation = {
        "do_sample": True,
        "repetition_penalty": 1.1,
        "temperature": 0.01,
        "top_p": 0.001,
        "top_k": 1,
    }
    found = read(QWEN2_5_0_5B, generation).generation
    assert found == GenerationDefaults((151645,), 0.01, 0.001, 1, None, 1.1, True)


# --- images


def test_image_processor_defaults_where_there_is_no_file():
    found = read(QWEN2_VL_2B).image_processor
    assert found == ImageProcessorConfig(
        "smart_resize",
        14,
        2,
        2,
        3136,
        1003520,
        (0.48145466, 0.4578275, 0.40821073),
        (0.26862954, 0.26130258, 0.27577711),
    )


@pytest.mark.parametrize("config", VLMS, ids=lambda c: c["model_type"])
def test_every_form_of_the_pixel_limits(config):
    expected = read(config, preprocessor=PREPROCESSOR).image_processor
    assert (expected.min_pixels, expected.max_pixels) == (3136, 12845056)
    bare = changed(PREPROCESSOR, drop=["min_pixels", "max_pixels"])
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    old = {"min_pixels": 3136, "max_pixels": 12845056}
    forms = [
        bare | {"size": size},
        bare | {"size": old},
        bare | {"size": {"shortest_edge": 1, "longest_edge": 2}} | old,  # the root wins
        {"image_processor": bare | {"size": size}, "processor_class": "Qwen2VLProcessor"},
    ]
    for form in forms:
        assert read(config, preprocessor=form).image_processor == expected


def test_image_processor_of_transformers():
    """What transformers' own class writes is read as what it was given."""
    transformers = pytest.importorskip("transformers", minversion="5")
    written = transformers.Qwen2VLImageProcessorPil(min_pixels=784, max_pixels=78400).to_dict()
    written = json.loads(json.dumps(written))
    found = read(QWEN2_VL_2B, preprocessor=written).image_processor
    assert (found.min_pixels, found.max_pixels) == (784, 78400)
    assert found.rescale_factor == pytest.approx(1 / 255)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"do_resize": False}, "do_resize false"),
        ({"do_normalize": False}, "do_normalize"),
        ({"resample": 2}, "resample 2"),
        ({"patch_size": 16}, "patch_size 16"),
        ({"merge_size": 1}, "merge_size 1"),
        ({"min_pixels": 10**9}, "min_pixels"),
        ({"image_std": [0.5, 0.5]}, "image_std"),
        ({"image_std": [0.5, 0.5, 0.0]}, "image_std"),
        ({"max_pixels": "many"}, "max_pixels 'many'"),
    ],
)
def test_unsupported_preprocessing_is_refused(values, word):
    refused(QWEN2_VL_2B, word, preprocessor=PREPROCESSOR | values)


# --- refusals


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        ("smollm2-135m", {"model_type": "mamba"}, ("'mamba'", "llama, qwen2, qwen2_5_vl")),
        ("smollm2-135m", {"model_type": None}, ("None", "qwen2_vl")),
        ("smollm2-135m", {"model_type": ["llama"]}, ("['llama']",)),
        ("smollm2-135m", {"hidden_act": "gelu"}, ("hidden_act 'gelu'", "'silu'")),
        ("smollm2-135m", {"attention_bias": True}, ("attention_bias true",)),
        ("smollm2-135m", {"mlp_bias": True}, ("mlp_bias true",)),
        ("smollm2-135m", {"hidden_size": 0}, ("hidden_size 0", "at least 1")),
        ("smollm2-135m", {"hidden_size": "576"}, ("hidden_size '576'",)),
        ("smollm2-135m", {"hidden_size": 580}, ("580", "num_attention_heads 9")),
        ("smollm2-135m", {"num_key_value_heads": 4}, ("9", "num_key_value_heads 4")),
        ("smollm2-135m", {"vocab_size": None}, ("'vocab_size'",)),
        ("smollm2-135m", {"rms_norm_eps": float("nan")}, ("rms_norm_eps nan",)),
        ("smollm2-135m", {"tie_word_embeddings": "yes"}, ("tie_word_embeddings 'yes'",)),
        ("smollm2-135m", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor 0.5",)),
        ("smollm2-135m", {"rope_scaling": {"type": "linear", "factor": 2}}, ("type 'linear'",)),
        ("smollm2-135m", {"rope_scaling": {"rope_type": "yarn"}}, ("rope_type 'yarn'",)),
        ("smollm2-135m", {"rope_scaling": {"rope_type": "llama3"}}, ("'factor'",)),
        ("smollm2-135m", {"rope_scaling": "llama3"}, ("rope_scaling", "'llama3'")),
        ("qwen2-vl-2b", {"rope_scaling": None}, ("mrope_section",)),
        ("qwen2-vl-2b", {"rope_scaling": {"type": "mrope"}}, ("type 'mrope'",)),
        (
            "qwen2.5-vl-3b",
            {"rope_scaling": {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4}},
            ("type 'yarn'",),
        ),
        (
            "qwen2-vl-2b",
            {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 20]}},
            ("[16, 24, 20]", "64"),
        ),
        (
            "qwen2-vl-2b",
            {"rope_scaling": {"mrope_section": [16, 24, 24], "mrope_interleaved": True}},
            ("mrope_interleaved true",),
        ),
        ("qwen2-vl-2b", {"image_token_id": 151936}, ("image_token_id 151936", "151936")),
        ("qwen2-vl-2b", {"vision_config": None}, ("'vision_config'",)),
        ("qwen2-vl-2b", {"text_config": [1]}, ("text_config", "[1]")),
    ],
)
def test_unsupported_config_is_refused_by_key_and_value(config, values, words):
    refused(changed(PUBLISHED[config], **values), *words)


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        ("qwen2-vl-2b", {"hidden_act": "gelu"}, ("hidden_act 'gelu'",)),
        ("qwen2-vl-2b", {"hidden_size": 3584}, ("3584", "1536")),
        ("qwen2-vl-2b", {"num_heads": 15}, ("1280", "15")),
        ("qwen2-vl-2b", {"in_chans": 4}, ("in_chans 4",)),
        ("qwen2.5-vl-3b", {"hidden_act": "gelu"}, ("hidden_act 'gelu'",)),
        ("qwen2.5-vl-3b", {"out_hidden_size": 3584}, ("3584", "2048")),
        ("qwen2.5-vl-3b", {"window_size": 100}, ("window_size 100",)),
        ("qwen2.5-vl-3b", {"fullatt_block_indexes": [32]}, ("[32]", "32")),
        ("qwen2.5-vl-3b", {"fullatt_block_indexes": 7}, ("fullatt_block_indexes 7",)),
    ],
)
def test_unsupported_vision_is_refused_by_key_and_value(config, values, words):
    refused(changed(PUBLISHED[config], "vision_config", **values), *words)


def test_sliding_window_is_refused_where_it_would_matter():
    base = QWEN2_5_0_5B
    refused(changed(base, use_sliding_window=True, sliding_window=4096), "sliding_window 4096")
    harmless = [
        {"use_sliding_window": True, "sliding_window": 32768},  # the whole context
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 24},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": False, "sliding_window": 4096},
        {"layer_types": ["full_attention"] * 24},
    ]
    for values in harmless:
        assert read(changed(base, **values)) == read(base)
    sliding = ["full_attention"] * 23 + ["sliding_attention"]
    refused(changed(base, layer_types=sliding, sliding_window=4096), "sliding_window 4096", "32768")
    refused(changed(base, layer_types=["linear_attention"] * 24), "'linear_attention'")
    assert read(changed(base, layer_types=sliding, sliding_window=32768)) == read(base)


def test_explicit_head_dim():
    config = read(changed(LLAMA_3_2_1B, head_dim=128))
    assert config.text.head_dim == 128
    shapes = FAMILIES["llama"].tensor_shapes(config)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4096, 2048)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (2048, 4096)
    assert read(changed(LLAMA_3_2_1B, head_dim=None)).text.head_dim == 64
