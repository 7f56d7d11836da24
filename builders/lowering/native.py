"""Blocks for TensorRT >= 10.15 and TensorRT-RTX: opset 24, attention and cache update as layers.

The cache is written in place (TensorScatter becomes KV_CACHE_UPDATE, whose output is its input),
K and V are never repeated for grouped queries, no score matrix exists.
"""

from dataclasses import dataclass

import numpy as np

from builders import tensors
from builders.blocks import Array, HeadNorms, Linear, reshape
from builders.graph import Graph
from builders.lowering import half
from builders.tensors import Interface
from edgevlm.config import HiddenAct, Limits, TextConfig, VisionConfig
from edgevlm.memory_plan import DType


@dataclass(frozen=True)
class NativeLowering:
    """fp16; float32 exists so that ONNX Runtime can check the arithmetic."""

    dtype: DType = "float16"
    name: str = "native"
    opset: int = 24
    ir_version: int = 11

    def text_interface(self, text: TextConfig, limits: Limits) -> Interface:
        """Inputs and outputs of the language model's graph."""
        return tensors.text_interface(text, limits, self.dtype)

    def vision_interface(self, vision: VisionConfig) -> Interface:
        """Inputs and outputs of the vision graph."""
        return tensors.vision_interface(vision, self.dtype)

    def linear(self, g: Graph, name: str, x: str, weight: Linear, bias: Array | None = None) -> str:
        """x times the transposed weight, INT4 kept packed."""
        return half.matmul(g, name, x, weight, bias, self.dtype, "DequantizeLinear")

    def rms_norm(self, g: Graph, name: str, x: str, weight: Array, eps: float) -> str:
        """RMSNormalization; stash_type 1 keeps its statistics in fp32."""
        scale = half.float_weight(g, f"{name}/weight", weight, self.dtype)
        return g.node(
            "RMSNormalization",
            [x, scale],
            f"{name}/RMSNormalization",
            axis=-1,
            epsilon=eps,
            stash_type=1,
        )

    def add_rms_norm(
        self, g: Graph, name: str, x: str, residual: str, weight: Array, eps: float
    ) -> tuple[str, str]:
        """Normed sum, and the sum."""
        total = g.node("Add", [x, residual], f"{name}/Add")
        return self.rms_norm(g, name, total, weight, eps), total

    def layer_norm(
        self, g: Graph, name: str, x: str, weight: Array, bias: Array, eps: float
    ) -> str:
        """LayerNormalization."""
        return half.layer_norm(g, name, x, weight, bias, eps, self.dtype)

    def add_layer_norm(
        self, g: Graph, name: str, x: str, residual: str, weight: Array, bias: Array, eps: float
    ) -> tuple[str, str]:
        """Normed sum, and the sum."""
        total = g.node("Add", [x, residual], f"{name}/Add")
        return self.layer_norm(g, name, total, weight, bias, eps), total

    def activation(self, g: Graph, name: str, x: str, kind: HiddenAct) -> str:
        """silu, quick_gelu or gelu."""
        return half.activation(g, name, x, kind, self.dtype)

    def gated(self, g: Graph, name: str, gate_up: str, size: int, kind: HiddenAct) -> str:
        """activation(gate) * up."""
        return half.gated(g, name, gate_up, size, kind, self.dtype)

    def text_attention(
        self,
        g: Graph,
        name: str,
        qkv: str,
        layer: int,
        text: TextConfig,
        limits: Limits,
        norms: HeadNorms | None = None,
    ) -> str:
        """Rotate, write into the cache at write_indices, attend to all that is written."""
        size, hq, hk = text.head_dim, text.num_attention_heads, text.num_key_value_heads
        q, k, v = half.split(g, f"{name}/Split", qkv, [hq * size, hk * size, hk * size])
        q, k, v = (
            half.heads(g, f"{name}/{part}", x, count, size)
            for part, x, count in (("q", q, hq), ("k", k, hk), ("v", v, hk))
        )
        if norms is not None:
            q = self.rms_norm(g, f"{name}/q_norm", q, norms[0], text.rms_norm_eps)
            k = self.rms_norm(g, f"{name}/k_norm", k, norms[1], text.rms_norm_eps)
        rope = ["rope_cos", "rope_sin", "position_ids"]
        q = g.node("RotaryEmbedding", [q, *rope], f"{name}/q/RotaryEmbedding")
        k = g.node("RotaryEmbedding", [k, *rope], f"{name}/k/RotaryEmbedding")
        cache = [
            g.node(
                "TensorScatter",
                [f"past_key_values.{layer}.{part}", new, "write_indices"],
                f"{name}/{part}/TensorScatter",
                f"present.{layer}.{part}",
                axis=2,
            )
            for part, new in (("key", k), ("value", v))
        ]
        mask = g.once("cache_mask", lambda: _cache_mask(g, "/mask", limits))
        out = g.node("Attention", [q, *cache, mask], f"{name}/Attention", scale=size**-0.5)
        return half.merge_heads(g, f"{name}/merge", out, hq * size)

    def vision_attention(
        self, g: Graph, name: str, qkv: str, vision: VisionConfig, windowed: bool
    ) -> str:
        """Rotate and attend, over the whole image or within each window."""
        count, size, width = vision.num_heads, vision.head_dim, vision.hidden_size
        kind = "windows" if windowed else "image"

        def rows(node: str, x: str) -> str:
            if windowed:
                return half.gather_windows(g, f"{node}/Gather", x)
            return half.unsqueeze(g, f"{node}/Unsqueeze", x, 0)

        cos = g.once(f"cos of {kind}", lambda: rows(f"/{kind}/cos", "vision_cos"))
        sin = g.once(f"sin of {kind}", lambda: rows(f"/{kind}/sin", "vision_sin"))
        parts = half.split(g, f"{name}/Split", rows(name, qkv), [width] * 3)
        q, k, v = (
            half.heads(g, f"{name}/{part}", x, count, size)
            for part, x in zip("qkv", parts, strict=True)
        )
        q = g.node("RotaryEmbedding", [q, cos, sin], f"{name}/q/RotaryEmbedding")
        k = g.node("RotaryEmbedding", [k, cos, sin], f"{name}/k/RotaryEmbedding")
        inputs = [q, k, v]
        if windowed:
            inputs.append(g.once("window mask", lambda: _window_mask(g, "/windows/mask")))
        out = g.node("Attention", inputs, f"{name}/Attention", scale=size**-0.5)
        merged = half.merge_heads(g, f"{name}/merge", out, width)
        if windowed:
            return half.leave_windows(g, f"{name}/leave", merged, width)
        return reshape(g, f"{name}/Reshape", merged, (-1, width))


def _cache_mask(g: Graph, name: str, limits: Limits) -> str:
    """[B, 1, S, max_seq_len]: token s of a chunk sees the cache up to write_indices + s."""
    start = half.unsqueeze(g, f"{name}/Unsqueeze_0", "write_indices", 1)
    own = g.node("Add", [start, half.sequence_positions(g, name)], f"{name}/Add")
    column = half.unsqueeze(g, f"{name}/Unsqueeze_1", own, 1, 3)
    places = g.constant(np.arange(limits.max_seq_len, dtype=np.int64).reshape(1, 1, 1, -1))
    return g.node("LessOrEqual", [places, column], f"{name}/LessOrEqual")


def _window_mask(g: Graph, name: str) -> str:
    """[num_windows, 1, P, P]: every patch of a window sees those that exist."""
    keys = half.unsqueeze(g, f"{name}/Keys", "window_mask", 1, 2)
    size = g.node("Shape", ["window_mask"], f"{name}/Shape", start=1, end=2)
    ones = g.constant(np.ones(2, np.int64))
    shape = g.node(
        "Concat", [ones, size, g.constant(np.ones(1, np.int64))], f"{name}/Concat", axis=0
    )
    return g.node("Expand", [keys, shape], f"{name}/Expand")
