import numpy as np
import pytest

from builders.models import FAMILIES
from builders.weights import RandomWeights
from edgevlm.config import (
    GenerationDefaults,
    ImageProcessorConfig,
    ModelConfig,
    RopeConfig,
    TextConfig,
    VisionConfig,
)

TEXT = TextConfig(
    "qwen2_5_vl", 96, 32, 2, 4, 2, 8, 48, 1e-6, RopeConfig(1e6, "mrope", (1, 1, 2)), False, True, 64
)
VISION = VisionConfig("qwen2_5_vl", 2, 32, 2, 24, 32, "silu", 3, 14, 2, 2, 112, (1,))
PROCESSOR = ImageProcessorConfig("smart_resize", 14, 2, 2, 3136, 50176, (0.5,) * 3, (0.5,) * 3)
CONFIG = ModelConfig("qwen2_5_vl", TEXT, GenerationDefaults((1,)), VISION, PROCESSOR)


def test_has_exactly_the_familys_tensors():
    weights = RandomWeights(CONFIG, 3)
    shapes = FAMILIES["qwen2_5_vl"].tensor_shapes(CONFIG)
    assert set(weights.names()) == set(shapes)
    for name in weights.names():
        tensor = weights.tensor(name)
        assert tensor.shape == weights.shape(name) == shapes[name]
        assert tensor.dtype == np.float32 and tensor.flags.c_contiguous


def test_values_depend_on_name_and_seed_only():
    names = sorted(RandomWeights(CONFIG, 3).names())
    one, other = RandomWeights(CONFIG, 3), RandomWeights(CONFIG, 3)
    forward = {name: one.tensor(name) for name in names}
    backward = {name: other.tensor(name) for name in reversed(names)}
    assert all(np.array_equal(forward[name], backward[name]) for name in names)
    q = "model.layers.{}.self_attn.q_proj.weight"
    assert not np.array_equal(forward[q.format(0)], forward[q.format(1)])
    assert not np.array_equal(forward[q.format(0)], RandomWeights(CONFIG, 4).tensor(q.format(0)))


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "visual.blocks.0.norm1.weight",
        "visual.merger.ln_q.weight",
    ],
)
def test_norm_weights_are_ones(name):
    assert (RandomWeights(CONFIG, 3).tensor(name) == 1).all()


def test_other_weights_are_normal():
    tensor = RandomWeights(CONFIG, 3).tensor("model.embed_tokens.weight")
    assert abs(tensor.mean()) < 0.002 and 0.018 < tensor.std() < 0.022


def test_unknown_name_is_a_key_error():
    with pytest.raises(KeyError):
        RandomWeights(CONFIG, 3).tensor("model.layers.2.mlp.up_proj.weight")


def test_a_long_tensor_repeats_no_row(monkeypatch):
    monkeypatch.setattr("builders.weights.BLOCK", 101)
    tensor = RandomWeights(CONFIG, 3).tensor("model.embed_tokens.weight")
    assert len(np.unique(tensor, axis=0)) == len(tensor)
    assert np.array_equal(tensor.reshape(-1)[:101], tensor.reshape(-1)[101:202])
