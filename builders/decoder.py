"""The language model's graph: one file, or a chain of stages of whole layers.

| tensor | shape |
|---|---|
| inputs_embeds, deepstack.N, hidden_states.N | [B, S, hidden_size] |
| qkv | [B, S, (heads + 2 kv_heads) * head_dim] |
| gate_up | [B, S, 2 * intermediate_size] |
| logits | [B, 1, vocab_size] float32, of the last position |
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from builders.blocks import Array, HeadNorms, Linear, Lowering, WeightPolicy, cast, last_position
from builders.graph import Graph, WeightBytes
from builders.quantize import (
    QuantizedWeight,
    check_fp16_range,
    choose_group_size,
    kept_16bit_reason,
    quantize,
)
from builders.rows import mapped, rows_of
from builders.tensors import hidden_states
from builders.weights import WeightSource
from edgevlm.bundle import TensorSpec
from edgevlm.config import Limits, TextConfig
from edgevlm.memory_plan import DType

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class GraphFile:
    """A written graph: what crosses its border and what its weights take."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: WeightBytes


@dataclass(frozen=True)
class TextPart:
    """Layers `first` up to `end`, and perhaps the head; the whole model is one such part."""

    first: int
    end: int
    head: bool


def text_graph(
    lowering: Lowering,
    source: WeightSource,
    text: TextConfig,
    limits: Limits,
    policy: WeightPolicy,
    path: Path,
    part: TextPart | None = None,
) -> GraphFile:
    """Write the decoder, or one stage of it."""
    part = part or TextPart(0, text.num_hidden_layers, True)
    inputs, outputs = text_border(lowering, text, limits, part)
    weights = _Weights(lowering, source, text, policy)
    with Graph(path, lowering.opset, lowering.ir_version) as g:
        for spec in inputs:
            g.input(spec)
        for spec in outputs:
            g.output(spec)
        x = "inputs_embeds" if part.first == 0 else f"hidden_states.{part.first}"
        hidden, branch = x, None
        for layer in range(part.first, part.end):
            hidden, branch = _layer(g, lowering, weights, layer, hidden, branch, limits)
        if part.head:
            _head(g, lowering, weights, hidden, branch)
        else:
            assert branch is not None, "a stage without a head has layers"
            name = f"hidden_states.{part.end}"
            g.node("Add", [branch, hidden], f"/{name}", output=name)
        g.save()
        return GraphFile(path, inputs, outputs, g.weight_bytes())


def write_embedding_table(source: WeightSource, path: Path, dtype: DType = "float16") -> None:
    """embed_tokens.bin: [vocab_size, hidden_size], row after row."""
    with path.open("wb") as file:
        for _, band in rows_of(source, EMBEDDING).bands():
            if dtype == "float16":
                check_fp16_range(band, EMBEDDING)
            file.write(np.ascontiguousarray(band, dtype).data)


def text_border(
    lowering: Lowering, text: TextConfig, limits: Limits, part: TextPart
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of a part: the whole graph's that it uses, and its hidden states."""
    whole = lowering.text_interface(text, limits)
    layers = range(part.first, part.end)

    def used(spec: TensorSpec) -> bool:
        name, _, rest = spec.name.partition(".")
        if rest:
            return int(rest.split(".")[0]) in layers
        if name == "inputs_embeds":
            return part.first == 0
        return part.head if name == "logits" else bool(layers)

    inputs = [spec for spec in whole.inputs if used(spec)]
    outputs = [spec for spec in whole.outputs if used(spec)]
    if part.first > 0:
        inputs.insert(0, hidden_states(text, part.first, lowering.dtype))
    if not part.head:
        outputs.insert(0, hidden_states(text, part.end, lowering.dtype))
    return tuple(inputs), tuple(outputs)


class _Weights:
    """The decoder's weights under a policy; a matrix is read when it is written."""

    def __init__(
        self, lowering: Lowering, source: WeightSource, text: TextConfig, policy: WeightPolicy
    ) -> None:
        self.lowering, self.source, self.text, self.policy = lowering, source, text, policy

    def vector(self, name: str) -> np.ndarray:
        """A norm's weight or a bias."""
        return self.source.tensor(name)

    def matrix(self, g: Graph, *names: str) -> Linear:
        """Matrices one above the other, [sum of N, K]."""
        k = self.source.shape(names[0])[1]
        group = None
        if self.policy.weights == "int4":
            group = choose_group_size(k, self.policy.group_size)
            if group is None:
                for name in names:
                    g.keep(name, kept_16bit_reason(k, self.policy.group_size))
        if group is not None:
            parts = [quantize(rows_of(self.source, name), group, name) for name in names]
            return parts[0] if len(parts) == 1 else QuantizedWeight.concatenate(parts)
        rows = rows_of(self.source, *names)
        return (
            rows if self.policy.weights == "fp32" else mapped(rows, _as_fp16(" and ".join(names)))
        )

    def bias(self, *names: str) -> np.ndarray | None:
        """Biases one after the other, where the model has them."""
        if not self.text.attention_bias:
            return None
        return np.concatenate([self.source.tensor(name) for name in names])

    def head_norms(self, attention: str) -> HeadNorms | None:
        """The weights of a layer's norms over heads, where the model has them."""
        if not self.text.qk_norm:
            return None
        return self.vector(f"{attention}.q_norm.weight"), self.vector(f"{attention}.k_norm.weight")


def _as_fp16(name: str) -> Callable[[Array], Array]:
    """Values as fp16 has them. Raises UnsupportedCheckpoint beyond its range."""

    def rounded(values: Array) -> Array:
        check_fp16_range(values, name)
        return values.astype(np.float16).astype(np.float32)

    return rounded


def _layer(
    g: Graph,
    lowering: Lowering,
    weights: _Weights,
    layer: int,
    hidden: str,
    branch: str | None,
    limits: Limits,
) -> tuple[str, str]:
    """One decoder layer on `hidden + branch`; (hidden, branch) again, whose sum is its output."""
    text = weights.text
    at, path = f"model.layers.{layer}", f"/layers.{layer}"
    norm = weights.vector(f"{at}.input_layernorm.weight")
    eps = text.rms_norm_eps
    if branch is None:
        normed = lowering.rms_norm(g, f"{path}/input_layernorm", hidden, norm, eps)
    else:
        normed, hidden = lowering.add_rms_norm(
            g, f"{path}/input_layernorm", branch, hidden, norm, eps
        )
    heads = [f"{at}.self_attn.{p}_proj" for p in "qkv"]
    matrix = weights.matrix(g, *(f"{h}.weight" for h in heads))
    bias = weights.bias(*(f"{h}.bias" for h in heads))
    qkv = lowering.linear(g, f"{path}/self_attn/qkv_proj", normed, matrix, bias)
    norms = weights.head_norms(f"{at}.self_attn")
    y = lowering.text_attention(g, f"{path}/self_attn", qkv, layer, text, limits, norms)
    matrix = weights.matrix(g, f"{at}.self_attn.o_proj.weight")
    y = lowering.linear(g, f"{path}/self_attn/o_proj", y, matrix)
    norm = weights.vector(f"{at}.post_attention_layernorm.weight")
    normed, hidden = lowering.add_rms_norm(
        g, f"{path}/post_attention_layernorm", y, hidden, norm, eps
    )
    matrix = weights.matrix(g, f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight")
    y = lowering.linear(g, f"{path}/mlp/gate_up_proj", normed, matrix)
    y = lowering.gated(g, f"{path}/mlp", y, text.intermediate_size, "silu")
    matrix = weights.matrix(g, f"{at}.mlp.down_proj.weight")
    y = lowering.linear(g, f"{path}/mlp/down_proj", y, matrix)
    if layer < text.deepstack:  # zero in the rows of text
        y = g.node("Add", [y, f"deepstack.{layer}"], f"{path}/deepstack")
    return hidden, y


def _head(g: Graph, lowering: Lowering, weights: _Weights, hidden: str, branch: str | None) -> None:
    """Final norm and logits of the last position."""
    text = weights.text
    norm = weights.vector("model.norm.weight")
    hidden = last_position(g, "/norm/last_hidden", hidden)
    if branch is None:
        normed = lowering.rms_norm(g, "/norm", hidden, norm, text.rms_norm_eps)
    else:
        branch = last_position(g, "/norm/last_branch", branch)
        normed, _ = lowering.add_rms_norm(g, "/norm", branch, hidden, norm, text.rms_norm_eps)
    matrix = weights.matrix(g, EMBEDDING if text.tie_word_embeddings else HEAD)
    logits = lowering.linear(g, "/lm_head", normed, matrix)
    if lowering.dtype != "float32":
        logits = cast(g, "/lm_head/float32", logits, "float32")
    g.node("Identity", [logits], "/logits", output="logits")
