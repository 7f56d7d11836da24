import json
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import builders.shards
from builders.checkpoint import Checkpoint, canonical_name
from builders.models import FAMILIES
from edgevlm.errors import UnsupportedCheckpoint

TEXT = {
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 32,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": TEXT | {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": TEXT | {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2_vl": TEXT
    | {
        "model_type": "qwen2_vl",
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "image_token_id": 5,
        "vision_start_token_id": 6,
        "vision_end_token_id": 7,
        "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16},
    },
}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<|end|>": 3}, "merges": []},
    "added_tokens": [{"id": 2, "content": "</s>"}],
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHARDS = ["first.safetensors", "the-rest.safetensors"]  # names need not be the usual ones


def values(model_type, **changes):
    """Random tensors for a config, by canonical name."""
    config = FAMILIES[model_type].read_config(CONFIGS[model_type] | changes, {}, None, ())
    random = np.random.default_rng(0)
    shapes = FAMILIES[model_type].tensor_shapes(config)
    return {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def write(path, model_type, tensors, **changes):
    """A whole checkpoint in one safetensors file."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[model_type] | changes))
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    save_file(tensors, path / "model.safetensors")
    return path


def shard(path):
    """Splits the one file into two with an index."""
    from safetensors.numpy import load_file

    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[:5], names[5:]), strict=True))
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, path / file)
    write_index(path, {n: file for file, part in parts.items() for n in part})
    return path


def write_index(path, weight_map):
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(path):
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


def refused(path, *words):
    with pytest.raises(UnsupportedCheckpoint) as caught:
        Checkpoint(path)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    return message


@pytest.fixture
def llama(tmp_path):
    return write(tmp_path / "llama", "llama", values("llama"))


# --- what a good one gives


@pytest.mark.parametrize("model_type", CONFIGS)
def test_single_file(tmp_path, model_type):
    tensors = values(model_type)
    checkpoint = Checkpoint(write(tmp_path, model_type, tensors))
    assert set(checkpoint.names()) == set(tensors) and checkpoint.extra == ()
    assert checkpoint.bytes == sum(t.nbytes for t in tensors.values())
    assert checkpoint.config.model_type == checkpoint.family.model_type == model_type
    for name, expected in tensors.items():
        found = checkpoint.tensor(name)
        assert found.dtype == np.float32 and found.flags.writeable
        assert np.array_equal(found, expected) and checkpoint.shape(name) == expected.shape


def test_two_shards_of_any_name(llama):
    checkpoint = Checkpoint(shard(llama))
    for name, expected in values("llama").items():
        assert np.array_equal(checkpoint.tensor(name), expected)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("BF16", ml_dtypes.bfloat16), ("F16", np.float16), ("F32", np.float32)]
)
def test_dtypes_become_float32_exactly(tmp_path, monkeypatch, kind, dtype):
    monkeypatch.setattr(builders.shards, "BAND", 100)  # several bands, the last one short
    tensors = {name: value.astype(dtype) for name, value in values("llama").items()}
    tensors[EMBEDDING][0, :4] = np.array([0.0, -0.0, 1e-7, -60000.0]).astype(dtype)
    checkpoint = Checkpoint(write(tmp_path, "llama", tensors))
    for name, expected in tensors.items():
        found = checkpoint.tensor(name)
        assert checkpoint.dtype(name) == kind
        assert np.array_equal(found.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def test_same_values_as_torch_reads(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    path = write(tmp_path, "llama", values("llama"))
    file = path / "model.safetensors"
    save_file({n: t.to(torch.bfloat16) for n, t in load_file(file).items()}, file)
    checkpoint = Checkpoint(path)
    for name, expected in load_file(file).items():
        assert np.array_equal(checkpoint.tensor(name), expected.float().numpy())


def test_tensors_are_read_only_when_asked(llama):
    checkpoint = Checkpoint(llama)
    size = (llama / "model.safetensors").stat().st_size
    with (llama / "model.safetensors").open("r+b") as file:
        file.truncate(size - 4)
    last = max(checkpoint.names(), key=lambda n: checkpoint._entries[n].start)
    with pytest.raises(UnsupportedCheckpoint, match=rf"{last}.*shorter"):
        checkpoint.tensor(last)


# --- names and tied heads (CASES 74)

PREFIXES = {
    "model.": lambda n: n,
    "model.language_model.": lambda n: (
        "model.language_model." + n.removeprefix("model.") if n.startswith("model.") else n
    ),
    "language_model.model.": lambda n: n if n.startswith("visual.") else "language_model." + n,
    "model.visual.": lambda n: "model." + n if n.startswith("visual.") else n,
    "head under model.": lambda n: "model." + n if n.startswith("lm_head.") else n,
    "head under model.language_model.": lambda n: (
        "model.language_model." + n if n.startswith("lm_head.") else n
    ),
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_vl"])
@pytest.mark.parametrize("case", ["tied+absent", "tied+equal", "tied+different", "untied", "none"])
def test_tied_heads_under_every_prefix(tmp_path, caplog, prefix, model_type, case):
    tied = case.startswith("tied")
    tensors = values(model_type, tie_word_embeddings=tied)
    if case == "tied+equal":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    elif case == "tied+different":
        tensors[HEAD] = tensors[EMBEDDING] + 1
    elif case == "none":
        del tensors[HEAD]
    stored = {PREFIXES[prefix](name): value for name, value in tensors.items()}
    path = write(tmp_path, model_type, stored, tie_word_embeddings=tied)
    if case == "none":
        refused(path, HEAD, "tie_word_embeddings false")
        return
    checkpoint = Checkpoint(path)
    own_head = case in ("tied+different", "untied")
    assert (HEAD in checkpoint.names()) == own_head
    assert checkpoint.config.text.tie_word_embeddings != own_head
    assert ("differs" in caplog.text) == (case == "tied+different")
    assert checkpoint.extra == ((HEAD,) if case == "tied+equal" else ())
    for name in checkpoint.names():
        assert np.array_equal(checkpoint.tensor(name), tensors[name])


def test_canonical_names_stay():
    for name in values("qwen2_vl"):
        assert canonical_name(name) == name


def test_one_tensor_under_two_names(llama):
    tensors = values("llama")
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"].copy()
    write(llama, "llama", tensors)
    refused(llama, "'model.norm.weight'", "'model.language_model.norm.weight'")


# --- damaged weights (CASES 70)


def test_missing_shard(llama):
    (shard(llama) / SHARDS[1]).unlink()
    refused(llama, SHARDS[1], "missing", "2 shards")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_shard(llama, keep):
    file = shard(llama) / SHARDS[1]
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    refused(llama, SHARDS[1], f"{len(data[:keep])} bytes")


def test_longer_file(llama):
    with (llama / "model.safetensors").open("ab") as file:
        file.write(b"more")
    refused(llama, "model.safetensors", "belong to no tensor")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


@pytest.mark.parametrize("file", [SHARDS[0], "tokenizer.json", "config.json"])
def test_lfs_pointer(llama, file):
    (shard(llama) / file).write_text(POINTER)
    refused(llama, file, "Git-LFS pointer", "git lfs pull")


def test_index_names_an_absent_tensor(llama):
    weight_map = read_index(shard(llama))
    write_index(llama, weight_map | {"model.layers.7.mlp.up_proj.weight": SHARDS[0]})
    refused(llama, "model.layers.7.mlp.up_proj.weight", SHARDS[0])


def test_index_sends_a_tensor_to_the_other_shard(llama):
    weight_map = read_index(shard(llama))
    name = next(n for n, f in weight_map.items() if f == SHARDS[0])
    write_index(llama, weight_map | {name: SHARDS[1]})
    refused(llama, name, SHARDS[1])


@pytest.mark.parametrize("place", ["../other.safetensors", "/etc/passwd", 3])
def test_index_points_out_of_the_directory(llama, place):
    weight_map = read_index(shard(llama))
    write_index(llama, weight_map | {"model.norm.weight": place})
    refused(llama, "model.norm.weight", str(place))


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_without_weight_map(llama, text):
    (shard(llama) / "model.safetensors.index.json").write_text(text)
    refused(llama, "index.json", "weight_map")


def test_wrong_shape_names_found_and_expected(llama):
    tensors = values("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = np.zeros((25, 16), np.float32)
    write(llama, "llama", tensors)
    refused(llama, name, "[25, 16]", "[24, 16]")


@pytest.mark.parametrize("name", sorted(values("llama")))
def test_every_tensor_is_needed(llama, name):
    tensors = values("llama")
    del tensors[name]
    write(llama, "llama", tensors)
    refused(llama, repr(name), "llama")


def test_dtype_that_is_not_read(llama):
    tensors = values("llama")
    tensors["model.norm.weight"] = np.ones(16, np.float64)
    write(llama, "llama", tensors)
    refused(llama, "model.norm.weight", "F64", "BF16")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_value_that_is_not_finite(llama, monkeypatch, value):
    monkeypatch.setattr(builders.shards, "BAND", 100)
    tensors = values("llama")
    tensors[EMBEDDING][9, 1] = value
    checkpoint = Checkpoint(write(llama, "llama", tensors))
    checkpoint.tensor("model.norm.weight")
    with pytest.raises(UnsupportedCheckpoint, match=rf"{value}.*{EMBEDDING}.*145 of 512"):
        checkpoint.tensor(EMBEDDING)


def test_unrelated_tensors_are_reported(llama):
    tensors = values("llama")
    extra = {"mtp.fc.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}
    tensors |= {name: np.ones(3, np.float32) for name in extra}
    assert set(Checkpoint(write(llama, "llama", tensors)).extra) == extra


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "visual.blocks.0.norm1.weight",
        "lm_head.bias",
    ],
)
def test_tensors_that_would_change_the_answer_are_refused(llama, name):
    write(llama, "llama", values("llama") | {name: np.ones(3, np.float32)})
    refused(llama, name)


# --- config and directory


def test_directory(tmp_path, llama):
    refused(tmp_path / "nowhere", "nowhere", "does not exist")
    refused(llama / "config.json", "is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is empty")
    (tmp_path / "empty" / "README.md").touch()
    refused(tmp_path / "empty", "no config.json")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("text", "word"),
    [("{not json", "not JSON"), ("", "empty"), ("[1]", "list"), ("[" * 100_000, "not JSON")],
)
def test_json_that_is_none(llama, file, text, word):
    (llama / file).write_text(text)
    refused(llama, file, word)


def test_json_that_is_not_text(llama):
    (llama / "config.json").write_bytes(b"\xff\xfe\x00")
    refused(llama, "config.json", "UTF-8")


def test_unknown_family_is_refused_before_the_weights(llama):
    (llama / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"model_type": "mamba"}))
    (llama / "model.safetensors").unlink()
    refused(llama, "'mamba'", "qwen2_5_vl")


@pytest.mark.parametrize("place", ["root", "text_config"])
def test_quantised_checkpoint(llama, place):
    config = dict(CONFIGS["llama"])
    quantised = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    config |= quantised if place == "root" else {"text_config": quantised}
    (llama / "config.json").write_text(json.dumps(config))
    refused(llama, "quantization_config", "awq")


def test_image_processor_files(tmp_path):
    path = write(tmp_path, "qwen2_vl", values("qwen2_vl"))
    assert Checkpoint(path).config.image_processor.max_pixels == 1003520
    processor = {"image_processor": {"size": {"shortest_edge": 3136, "longest_edge": 6272}}}
    (path / "processor_config.json").write_text(json.dumps(processor))
    assert Checkpoint(path).config.image_processor.max_pixels == 6272
    (path / "preprocessor_config.json").write_text('{"min_pixels": 784, "max_pixels": 7840}')
    assert Checkpoint(path).config.image_processor.max_pixels == 7840
    (path / "preprocessor_config.json").unlink()
    (path / "processor_config.json").write_text('{"processor_class": "Qwen2VLProcessor"}')
    assert Checkpoint(path).config.image_processor.max_pixels == 1003520


def test_generation_config_is_read(llama):
    (llama / "generation_config.json").write_text('{"eos_token_id": [1, 9], "temperature": 0.5}')
    found = Checkpoint(llama).config.generation
    assert (found.eos_token_ids, found.temperature) == ((1, 2, 9), 0.5)


def test_imports_no_torch_and_no_transformers():
    import subprocess

    script = (
        "import sys, builders.checkpoint, builders.quantize, builders.weights; "
        "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
