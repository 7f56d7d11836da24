"""The host decoder against transformers in fp32, on tiny random models."""

import numpy as np
import pytest

from builders.blocks import WeightPolicy
from builders.decoder import TextPart, text_graph, write_embedding_table
from builders.lowering.host import HostLowering
from builders.quantize import choose_group_size, quantize
from edgevlm.config import Limits
from edgevlm.positions import ImageRun, mrope_positions
from tests.graphs import Graphs, assert_close, tiny_model

torch = pytest.importorskip("torch")

LIMITS = Limits(max_seq_len=64, max_prefill_chunk=32, slots=3)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen2_vl": ("qwen2_vl", {}),
    "qwen2_5_vl": ("qwen2_5_vl", {"tie_word_embeddings": True}),
    "qwen3_vl": ("qwen3_vl", {}),
}
EMBEDDING = "model.embed_tokens.weight"


class Case:
    """A tiny model, its fp32 graph, and random prompts."""

    def __init__(self, name, path, weights="fp32"):
        kind, changes = MODELS[name]
        self.hf, self.config, self.source = tiny_model(kind, **changes)
        self.table = self.source.tensor(EMBEDDING)
        self.graphs = self.build(path, weights)

    def build(self, path, weights="fp32", parts=(None,), source=None):
        files = [
            text_graph(
                HostLowering(),
                source or self.source,
                self.config.text,
                LIMITS,
                WeightPolicy(weights, 32),
                path / f"{weights}.{i}.onnx",
                part,
            )
            for i, part in enumerate(parts)
        ]
        return Graphs(self.config, LIMITS, *files)

    def prompt(self, length, seed=0):
        return np.random.default_rng(seed).integers(0, 150, length)

    def reference(self, ids, positions=None):
        """transformers' logits [S, vocab]."""
        places = None if positions is None else torch.tensor(positions)[:, None]
        with torch.no_grad():
            if places is None:
                return self.hf(input_ids=torch.tensor(ids)[None]).logits[0].numpy()
            text = self.hf.model.language_model
            hidden = text(inputs_embeds=torch.tensor(self.table[ids])[None], position_ids=places)
            return self.hf.lm_head(hidden.last_hidden_state)[0].numpy()


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return Case("qwen2", tmp_path_factory.mktemp("qwen2"))


def test_prefill_then_decode_is_what_transformers_says(case):
    ids = case.prompt(20)
    wanted = case.reference(ids)
    embeds = case.table[ids]
    assert_close(case.graphs.prefill(embeds[:14], slot=1), wanted[13])
    for n in range(14, 20):
        assert_close(case.graphs.decode(embeds[n : n + 1], [n], slot=1)[0], wanted[n])


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunks_change_nothing(case, chunk):
    embeds = case.table[case.prompt(20)]
    whole = case.graphs.prefill(embeds)
    np.testing.assert_allclose(
        case.graphs.prefill(embeds, slot=2, chunk=chunk), whole, rtol=1e-4, atol=1e-4
    )


def test_slots_decoded_together_are_each_alone(case):
    prompts = [case.prompt(length, seed) for seed, length in enumerate((5, 21, 12))]
    for slot, ids in enumerate(prompts):
        case.graphs.prefill(case.table[ids[:-1]], slot=slot)
    last = np.stack([case.table[ids[-1]] for ids in prompts])
    found = case.graphs.decode(last, [len(ids) - 1 for ids in prompts])
    for slot, ids in enumerate(prompts):
        assert_close(found[slot], case.reference(ids)[-1])


def test_a_follow_up_reuses_the_beginning(qwen2):
    ids = qwen2.prompt(20)
    qwen2.graphs.prefill(qwen2.table[ids])
    other = np.concatenate([ids[:9], qwen2.prompt(6, seed=5)])
    found = qwen2.graphs.prefill(qwen2.table[other[9:]], start=9)
    assert_close(found, qwen2.reference(other)[-1])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_three_dimensional_positions(name, tmp_path):
    case = Case(name, tmp_path)
    ids = case.prompt(22)
    positions, delta = mrope_positions(
        22, [ImageRun(4, 12, 0)], [(1, 6, 8)], merge=2
    )  # rows and columns differ, and text goes on after the longer side
    assert delta < 0 and len({tuple(p) for p in positions[:, 4:16].T}) == 12
    wanted = case.reference(ids, positions)
    found = case.graphs.prefill(case.table[ids[:21]], slot=1, chunk=5, positions=positions[:, :21])
    assert_close(found, wanted[20])
    found = case.graphs.decode(case.table[ids[21:]], [21], slot=1, delta=delta)
    assert_close(found[0], wanted[21])


def test_stages_are_the_whole(qwen2, tmp_path):
    parts = [TextPart(0, 2, False), TextPart(2, 3, False), TextPart(3, 3, True)]
    staged = qwen2.build(tmp_path, parts=parts)
    embeds = qwen2.table[qwen2.prompt(11)]
    np.testing.assert_allclose(staged.prefill(embeds), qwen2.graphs.prefill(embeds), atol=1e-5)
    names = [[spec.name for spec in file.inputs] for file, _ in staged.stages]
    assert names[0][0] == "inputs_embeds" and names[1][0] == "hidden_states.2"
    assert names[2] == ["hidden_states.3"]


class Dequantized:
    """A source whose matrices have been through INT4."""

    def __init__(self, source):
        self.source, self.shape = source, source.shape

    def tensor(self, name):
        values = self.source.tensor(name)
        if values.ndim != 2:
            return values
        return quantize(values, choose_group_size(values.shape[1], 32)).dequantize()

    def rows(self, name, begin, end):
        return self.tensor(name)[begin:end]


def test_int4_computes_with_the_weights_that_its_codes_stand_for(qwen2, tmp_path):
    packed = qwen2.build(tmp_path, "int4")
    floats = qwen2.build(tmp_path, "fp32", source=Dequantized(qwen2.source))
    embeds = qwen2.table[qwen2.prompt(20)]
    # Activations are rounded to 8 bits by groups of 32: off by absmax / 127 / sqrt(12), and absmax
    # is about 2.3 times their norm, so 0.5 % of each product. 12 products and the head: 0.5 % *
    # sqrt(13) = 1.9 %, and twice that is allowed. cos(0.038) is what remains.
    assert_close(packed.prefill(embeds), floats.prefill(embeds), cosine=1 - 0.038**2 / 2)
    (file, _), *_ = packed.stages
    matrices = [s for s in qwen2.source.names() if qwen2.source.tensor(s).ndim == 2]
    elements = sum(int(np.prod(qwen2.source.shape(s))) for s in matrices)
    if qwen2.config.text.tie_word_embeddings:  # the head is in the file under both names
        elements -= qwen2.table.size if "lm_head.weight" in matrices else 0
    assert file.weights.packed_int4 == elements // 2 + elements // 32 * 4
    assert not file.weights.kept_16bit


def test_what_int4_cannot_hold_stays_and_says_why(tmp_path):
    _, config, source = tiny_model("qwen2", intermediate_size=40)
    file = text_graph(
        HostLowering(), source, config.text, LIMITS, WeightPolicy("int4"), tmp_path / "llm.onnx"
    )
    kept = {k.name: k.reason for k in file.weights.kept_16bit}
    assert set(kept) == {f"model.layers.{n}.mlp.down_proj.weight" for n in range(3)}
    assert set(kept.values()) == {"input size 40 is not a multiple of 128 or 64 or 32"}


def test_fp16_rounds_the_weights_and_computes_in_fp32(qwen2, tmp_path):
    rounded = qwen2.build(tmp_path, "fp16")
    embeds = qwen2.table[qwen2.prompt(20)]
    found, wanted = rounded.prefill(embeds), qwen2.graphs.prefill(embeds)
    assert not np.array_equal(found, wanted)
    assert_close(found, wanted)


def test_the_embedding_table_is_a_raw_fp16_file(qwen2, tmp_path):
    write_embedding_table(qwen2.source, tmp_path / "embed_tokens.bin")
    found = np.fromfile(tmp_path / "embed_tokens.bin", np.float16).reshape(qwen2.table.shape)
    np.testing.assert_array_equal(found, qwen2.table.astype(np.float16))
