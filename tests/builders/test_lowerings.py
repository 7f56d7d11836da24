"""native and classic: the host's numbers on ONNX Runtime, and engines as small as they must be."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from builders.blocks import WeightPolicy
from builders.decoder import GraphFile, TextPart, text_graph
from builders.engine import (
    Compiler,
    Profile,
    StageReport,
    compile_stage,
    decode_profile,
    prefill_profile,
    vision_profile,
)
from builders.graph import Graph
from builders.lowering.classic import ClassicLowering
from builders.lowering.host import HostLowering
from builders.lowering.native import NativeLowering
from builders.quantize import choose_group_size, quantize
from builders.qwen_tower import VisionPart, vision_graph
from builders.targets import TARGETS, find_target, lowering_for
from builders.tensors import cache_shapes, new_cache_shapes, rope_rows
from builders.weights import RandomWeights
from edgevlm.bundle import TensorSpec
from edgevlm.config import (
    GenerationDefaults,
    ImageProcessorConfig,
    Limits,
    ModelConfig,
    RopeConfig,
    TextConfig,
    VisionConfig,
)
from edgevlm.errors import BuildError

rtx = pytest.mark.rtx
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed"
)
RTX = Compiler("tensorrt-rtx", "SM86")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2", "llama")
LOWERINGS = {"native": NativeLowering, "classic": ClassicLowering}
OLD_PARSER = set((Path(__file__).parent / "onnx_ops_tensorrt_10.1.txt").read_text().split())
MB = 1_000_000
GEMM_SCRATCH = 8.4 * MB  # what the compiler sets aside for split products, whatever the sizes


def model_of(family: str, hidden: int = 64, head_dim: int = 16, vocab: int = 96) -> ModelConfig:
    """Two layers of a family; four heads share two of K and V."""
    vlm = family.endswith("vl")
    section = (head_dim // 8, head_dim // 8, head_dim // 4)
    rope = RopeConfig(1e4, "mrope", section) if vlm else RopeConfig(1e4)
    bias, tied = family.startswith("qwen2"), family != "llama"
    sizes = (vocab, hidden, 2, 4, 2, head_dim, hidden * 2)
    three = family == "qwen3_vl"
    text = TextConfig(family, *sizes, 1e-6, rope, tied, bias, 4096, three, int(three))
    if not vlm:
        return ModelConfig(family, text, GenerationDefaults((1,)))
    act, window, full = ("silu", 56, (1,)) if "5" in family else ("quick_gelu", None, ())
    act, learned = ("gelu_pytorch_tanh", (64, (0,))) if three else (act, ())
    width = hidden // 2
    sizes = (2, width, 4, width * 2, hidden)
    vision = VisionConfig(family, *sizes, act, 3, 14, 2, 2, window, full, *learned)
    processor = ImageProcessorConfig(
        "smart_resize", 14, 2, 2, 784, 784 * 64, (0.5,) * 3, (0.5,) * 3
    )
    return ModelConfig(family, text, GenerationDefaults((1,)), vision, processor)


class Loud:
    """Random weights large enough for softmaxes that choose; perhaps as INT4 leaves them."""

    def __init__(self, model: ModelConfig, group_size: int | None = None) -> None:
        self.random, self.group_size = RandomWeights(model), group_size
        self.names, self.shape = self.random.names, self.random.shape

    def tensor(self, name: str) -> np.ndarray:
        values = self.random.tensor(name)
        if "norm" not in name and "ln_q" not in name:
            values *= 8
        if self.group_size and values.ndim == 2 and not name.startswith("visual."):
            group = choose_group_size(values.shape[1], self.group_size)
            assert group is not None
            return quantize(values, group, name).dequantize()
        return values

    def rows(self, name: str, begin: int, end: int) -> np.ndarray:
        return self.tensor(name)[begin:end]


class Decoder:
    """Runs a language model's graph on ONNX Runtime, with the cache copies that it needs."""

    def __init__(self, file: GraphFile, text: TextConfig, limits: Limits) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3  # it warns of a present that is not bound to its past
        self.session = ort.InferenceSession(str(for_onnx_runtime(file.path)), options)
        self.cache = {n: np.zeros(s, d) for n, d, s in cache_shapes(text, limits, "float32")}
        self.deepstack = [f"deepstack.{n}" for n in range(text.deepstack)]
        rows = np.arange(rope_rows(text, limits))[:, None]
        angles = rows * 1e4 ** (-np.arange(0, text.head_dim, 2) / text.head_dim)
        self.rope = {"rope_cos": np.cos(angles, dtype="f4"), "rope_sin": np.sin(angles, dtype="f4")}

    def __call__(self, embeds: np.ndarray, slots: list[int], lengths: list[int]) -> np.ndarray:
        """Logits [B, vocab] after embeds [B, S, hidden] for these slots."""
        batch, length, _ = embeds.shape
        starts = np.array(lengths, np.int64)
        feeds = {
            "inputs_embeds": embeds,
            "position_ids": starts[:, None] + np.arange(length),
            "write_indices": starts,
            **{name: embeds[..., ::-1].copy() for name in self.deepstack},
            **self.rope,
            **{name: np.ascontiguousarray(whole[slots]) for name, whole in self.cache.items()},
        }
        names = [o.name for o in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, feeds), strict=True))
        for name, whole in self.cache.items():
            if (new := outputs.get(name.replace("past_key_values", "new"))) is not None:
                for i, (slot, start) in enumerate(zip(slots, lengths, strict=True)):
                    whole[slot, :, start : start + length] = new[i]
            else:
                whole[slots] = outputs[name.replace("past_key_values", "present")]
        assert outputs["logits"].shape[:2] == (batch, 1) and outputs["logits"].dtype == np.float32
        return outputs["logits"][:, 0]


def for_onnx_runtime(path: Path) -> Path:
    """The same graph with TensorRT's INT4 operator under its standard name."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "TRT_INT4DequantizeLinear":
            node.op_type, node.domain = "DequantizeLinear", ""
            model.opset_import[0].version = 21  # the first with INT4 and blocks
    copy = path.with_name(f"ort.{path.name}")
    copy.write_bytes(model.SerializeToString())
    return copy


def conversation(decoder: Decoder, hidden: int) -> list[np.ndarray]:
    """A prefill in two chunks, another sequence beside it, then steps of both; all logits."""
    random = np.random.default_rng(5)

    def embeds(*shape: int) -> np.ndarray:
        return random.standard_normal((*shape, hidden), dtype=np.float32)

    return [
        decoder(embeds(1, 7), [0], [0]),
        decoder(embeds(1, 5), [0], [7]),
        decoder(embeds(1, 4), [1], [0]),
        decoder(embeds(2, 1), [0, 1], [12, 4]),
        decoder(embeds(2, 1), [0, 1], [13, 5]),
        decoder(embeds(1, 1), [1], [6]),
    ]


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal to fp32's rounding. The scale proves that there is something to compare."""
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("weights", ["fp32", "int4"])
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_hosts(tmp_path, family, lowering, weights):
    model, limits = model_of(family), Limits(24, 8, 2)
    source = Loud(model, 32 if weights == "int4" else None)
    host = text_graph(
        HostLowering(), source, model.text, limits, WeightPolicy("fp32"), tmp_path / "host.onnx"
    )
    file = text_graph(
        LOWERINGS[lowering]("float32"),
        Loud(model),
        model.text,
        limits,
        WeightPolicy(weights, 32),
        tmp_path / "llm.onnx",
    )
    expected = conversation(Decoder(host, model.text, limits), model.text.hidden_size)
    found = conversation(Decoder(file, model.text, limits), model.text.hidden_size)
    for step, wanted in zip(found, expected, strict=True):
        assert_same(step, wanted)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_image_features_are_the_hosts(tmp_path, family, lowering):
    vision = model_of(family).vision
    source = Loud(model_of(family))
    random = np.random.default_rng(6)
    patches = 40
    angles = random.standard_normal((patches, vision.head_dim // 2), dtype=np.float32)
    feeds = {
        "pixel_values": random.standard_normal((patches, vision.patch_dim), dtype=np.float32) / 4,
        "vision_cos": np.cos(angles),
        "vision_sin": np.sin(angles),
    }
    if vision.window_size is not None:  # three windows of 16 places, 40 of them taken
        places = np.sort(random.permutation(48)[:patches])
        mask = np.zeros(48, bool)
        mask[places] = True
        index = np.zeros(48, np.int64)
        index[places] = random.permutation(patches)
        feeds |= {
            "window_index": index.reshape(3, 16),
            "window_mask": mask.reshape(3, 16),
            "window_position": places[np.argsort(index[places])],
        }
    if vision.num_position_embeddings is not None:
        feeds["pos_embed_index"] = random.integers(0, vision.num_position_embeddings, (patches, 4))
        feeds["pos_embed_weight"] = random.random((patches, 4), dtype=np.float32)
    features = []
    for spelling in (HostLowering(), LOWERINGS[lowering]("float32")):
        path = tmp_path / f"{spelling.name}.onnx"
        vision_graph(spelling, source, vision, path)
        features.append(ort.InferenceSession(str(path)).run(None, feeds))
    for found, expected in zip(*features, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_classic_holds_only_what_the_old_parser_knows(tmp_path, family):
    model = model_of(family)
    lowering, source = ClassicLowering(), Loud(model)
    policy = WeightPolicy("int4", 32)
    text_graph(lowering, source, model.text, Limits(24, 8, 2), policy, tmp_path / "llm.onnx")
    if model.vision is not None:
        vision_graph(lowering, source, model.vision, tmp_path / "vision.onnx")
    for path in tmp_path.glob("*.onnx"):
        graph = onnx.load(path, load_external_data=False)
        versions = {o.domain: o.version for o in graph.opset_import}
        assert versions.pop("") == 20 and set(versions) <= {"trt"}
        unknown = {node.op_type for node in graph.graph.node} - OLD_PARSER
        assert not unknown


def test_classic_gives_the_new_keys_and_values_in_place_of_the_cache():
    text, limits = model_of("qwen2").text, Limits(24, 8, 2)
    interface = ClassicLowering().text_interface(text, limits)
    assert [spec.name for spec in interface.outputs] == [
        "logits", "new.0.key", "new.0.value", "new.1.key", "new.1.value",
    ]  # fmt: skip
    assert interface.outputs[1].shape == ("batch_size", 2, "sequence_length", 16)
    placed = {name: shape for name, _, shape in new_cache_shapes(text, limits, "float16")}
    assert all(placed[spec.placement] == (8, 2, 16) for spec in interface.outputs[1:])


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_norms_of_large_values_stay_finite(tmp_path, lowering):
    spelling = LOWERINGS[lowering]()
    with Graph(tmp_path / "norm.onnx", spelling.opset, spelling.ir_version) as g:
        g.input(TensorSpec("x", "float16", ("rows", 64), "x"))
        y = spelling.rms_norm(g, "/norm", "x", np.ones(64, np.float32), 1e-6)
        g.node("Identity", [y], "/y", "y")
        g.output(TensorSpec("y", "float16", ("rows", 64), "y"))
        g.save()
    x = np.full((1, 64), 30_000, np.float16)  # its square is far beyond fp16
    (y,) = ort.InferenceSession(str(tmp_path / "norm.onnx")).run(None, {"x": x})
    np.testing.assert_allclose(y, 1, rtol=1e-3)


def test_targets():
    assert find_target("host").compiler is None
    assert lowering_for(find_target("rtx-sm86")).name == "native"
    assert lowering_for(find_target("rtx-sm86"), "classic").name == "classic"
    for target in TARGETS.values():
        assert [lowering_for(target, n).name for n in target.lowerings] == list(target.lowerings)
    with pytest.raises(BuildError, match="no target 'jetson'; there are host, rtx-sm86"):
        find_target("jetson")
    with pytest.raises(BuildError, match="host has no lowering 'native'; it has host"):
        lowering_for(find_target("host"), "native")


def compiled(path: Path, *profiles: Profile) -> StageReport:
    return compile_stage(path, profiles, path.with_suffix(".engine"), compiler=RTX)


@rtx
@needs_rtx
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_stay_packed(tmp_path, family, lowering):
    """Wide enough for real kernels; below that the compiler unpacks what is cheap to unpack."""
    model, limits = model_of(family, 512, 128, 1024), Limits(1024, 128, 2)
    spelling, source = LOWERINGS[lowering](), RandomWeights(model)
    policy = WeightPolicy("int4", 128)
    file = text_graph(spelling, source, model.text, limits, policy, tmp_path / "llm.onnx")
    report = compiled(file.path, prefill_profile(128), decode_profile(2))
    weights = file.weights.packed_int4 + file.weights.floats
    assert file.weights.packed_int4 > 0.9 * weights
    assert 0.98 * weights <= report.weights_bytes <= 1.02 * weights
    assert report.layers["DEQUANTIZE"] == 9  # qkv, o, gate_up and down of two layers, the head
    assert report.layers.get("KV_CACHE_UPDATE", 0) == (4 if lowering == "native" else 0)
    assert report.layers.get("ATTENTION", 0) == (2 if lowering == "native" else 0)
    unpacked = 1024 * 512 * 2  # one matrix of the MLP in fp16
    rows = 128 * 512 * 2 * 16  # a chunk of a dozen hidden states
    assert report.scratch_bytes["prefill"] <= GEMM_SCRATCH + rows + 2 * unpacked
    cache_copy = 2 * 2 * 1024 * 128 * 2 * 2 * 2  # grouped heads repeated: K and V of two slots
    allowed = 0 if lowering == "native" else 3 * cache_copy
    assert report.scratch_bytes["decode"] <= GEMM_SCRATCH + allowed
    if model.vision is not None:
        vision = vision_graph(spelling, source, model.vision, tmp_path / "vision.onnx")
        windows = 32 if model.vision.window_size else 0
        report = compiled(vision.path, vision_profile(256, windows))
        assert report.weights_bytes <= 1.02 * vision.weights.floats


def attention_graph(path: Path, lowering: str, text: TextConfig, limits: Limits) -> None:
    spelling = LOWERINGS[lowering]()
    rows = ("batch_size", "sequence_length")
    width = text.num_attention_heads * text.head_dim
    qkv = width + 2 * text.num_key_value_heads * text.head_dim
    interface = spelling.text_interface(text, limits)
    with Graph(path, spelling.opset, spelling.ir_version) as g:
        for spec in (TensorSpec("qkv", "float16", (*rows, qkv), ""), *interface.inputs[1:]):
            g.input(spec)
        for spec in (*interface.outputs[1:], TensorSpec("y", "float16", (*rows, width), "")):
            g.output(spec)
        y = spelling.text_attention(g, "/attn", "qkv", 0, text, limits)
        g.node("Identity", [y], "/y", "y")
        g.save()


@rtx
@needs_rtx
@pytest.mark.parametrize(
    ("lowering", "prefill", "decode"),
    [
        ("native", 80 * MB, 0.5 * MB),  # decode: nothing of the 33 MB of K and V is copied
        ("classic", 280 * MB, 33 * MB),  # two score matrices of 28 x 512 x 4608; one of K and V
    ],
)
def test_scratch_of_a_7bs_attention(tmp_path, lowering, prefill, decode):
    text = replace(
        model_of("qwen2").text,
        num_hidden_layers=1,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
    )
    path = tmp_path / "attention.onnx"
    attention_graph(path, lowering, text, Limits(4096, 512, 4))
    report = compiled(path, prefill_profile(512), decode_profile(4))
    assert report.scratch_bytes["prefill"] <= prefill
    assert report.scratch_bytes["decode"] <= decode


@rtx
@needs_rtx
@pytest.mark.parametrize(
    ("family", "lowering"),
    [("qwen2_vl", "native"), ("qwen2_vl", "classic"), ("qwen2_5_vl", "native")],
)
def test_scratch_of_a_real_tower_is_linear_in_patches(tmp_path, family, lowering):
    """Two blocks of the published width; a score matrix would grow 16 times."""
    wide = dict(depth=3, hidden_size=1280, num_heads=16, intermediate_size=1280)
    if family == "qwen2_5_vl":
        wide |= dict(window_size=112)
    model = model_of(family)
    model = replace(model, vision=replace(model.vision, **wide))
    path, blocks = tmp_path / "vision.onnx", VisionPart(0, 2)  # the merger adds only weights
    vision_graph(LOWERINGS[lowering](), RandomWeights(model), model.vision, path, blocks)
    scratch = [
        compiled(path, vision_profile(n, n // 32 if model.vision.window_size else 0)).scratch_bytes[
            "vision"
        ]
        for n in (1024, 4096)
    ]
    assert scratch[1] <= 4.2 * scratch[0]
    assert scratch[1] <= 4096 * 1280 * 2 * 24  # a dozen hidden states, not 537 MB of scores


def test_a_stage_without_a_head_and_one_of_a_head_alone(tmp_path):
    """The chain gives what the whole graph gives."""
    model, limits = model_of("qwen2"), Limits(24, 8, 2)
    spelling, source, policy = NativeLowering("float32"), Loud(model), WeightPolicy("fp32")
    whole = text_graph(spelling, source, model.text, limits, policy, tmp_path / "whole.onnx")
    parts = [
        text_graph(spelling, source, model.text, limits, policy, tmp_path / f"{i}.onnx", part)
        for i, part in enumerate([TextPart(0, 2, False), TextPart(2, 2, True)])
    ]
    decoder = Decoder(whole, model.text, limits)
    embeds = np.random.default_rng(1).standard_normal((1, 6, 64), dtype=np.float32)
    expected = decoder(embeds, [0], [0])
    values = {
        "inputs_embeds": embeds,
        "position_ids": np.arange(6)[None],
        "write_indices": np.zeros(1, np.int64),
        **decoder.rope,
        **{n: np.zeros((1, *c.shape[1:]), "f4") for n, c in decoder.cache.items()},
    }
    for part in parts:
        session = ort.InferenceSession(str(part.path))
        names = [o.name for o in session.get_outputs()]
        feeds = {i.name: values[i.name] for i in session.get_inputs()}
        values |= dict(zip(names, session.run(names, feeds), strict=True))
    assert_same(values["logits"][:, 0], expected)
