"""Blocks for TensorRT 10.3 (JetPack 6): opset 20, only operators that its ONNX parser knows.

There is no cache update in it: the new K and V leave as `new.N.key` and `new.N.value`, and the
executor copies them into the cache after the run. Scores over the cache and scores over the new
tokens meet before the softmax; the cache itself is never concatenated.
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
class ClassicLowering:
    """fp16; float32 exists so that ONNX Runtime can check the arithmetic."""

    dtype: DType = "float16"
    name: str = "classic"
    opset: int = 20
    ir_version: int = 10  # the first with INT4 tensors

    def text_interface(self, text: TextConfig, limits: Limits) -> Interface:
        """Inputs and outputs of the language model's graph: `new` where others have `present`."""
        return tensors.classic_text_interface(text, limits, self.dtype)

    def vision_interface(self, vision: VisionConfig) -> Interface:
        """Inputs and outputs of the vision graph."""
        return tensors.vision_interface(vision, self.dtype)

    def linear(self, g: Graph, name: str, x: str, weight: Linear, bias: Array | None = None) -> str:
        """x times the transposed weight; this operator says INT4 where the parser assumes INT8."""
        return half.matmul(g, name, x, weight, bias, self.dtype, "trt.TRT_INT4DequantizeLinear")

    def rms_norm(self, g: Graph, name: str, x: str, weight: Array, eps: float) -> str:
        """RMSNorm from primitives."""
        return half.rms_norm(g, name, x, weight, eps, self.dtype)

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
        """Rotate, attend to the cache before write_indices and causally to the new tokens."""
        size, hq, hk = text.head_dim, text.num_attention_heads, text.num_key_value_heads
        q, k, v = half.split(g, f"{name}/Split", qkv, [hq * size, hk * size, hk * size])
        q, k = (
            half.heads(g, f"{name}/{part}", x, count, size)
            for part, x, count in (("q", q, hq), ("k", k, hk))
        )
        if norms is not None:
            q = self.rms_norm(g, f"{name}/q_norm", q, norms[0], text.rms_norm_eps)
            k = self.rms_norm(g, f"{name}/k_norm", k, norms[1], text.rms_norm_eps)
        cos = g.once("rope_cos", lambda: _rope_rows(g, "/rope_cos", "rope_cos"))
        sin = g.once("rope_sin", lambda: _rope_rows(g, "/rope_sin", "rope_sin"))
        q = self._scaled(g, name, half.rotate(g, f"{name}/q/rope", q, cos, sin, size), size)
        k = half.rotate(g, f"{name}/k/rope", k, cos, sin, size, f"new.{layer}.key")
        v = half.heads(g, f"{name}/v", v, hk, size, f"new.{layer}.value")
        # heads that share K and V become rows of one product: [B, HK, rep * S, D]
        q = reshape(g, f"{name}/q/Group", q, (0, hk, -1, size))
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        out = self._attend(g, name, q, past, (k, v), limits.max_seq_len, hq // hk)
        out = reshape(g, f"{name}/Ungroup", out, (0, hq, -1, size))
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

        def table(part: str) -> str:
            return half.unsqueeze(g, f"/{kind}/{part}/Heads", rows(f"/{kind}/{part}", part), 1)

        cos = g.once(f"cos of {kind}", lambda: table("vision_cos"))
        sin = g.once(f"sin of {kind}", lambda: table("vision_sin"))
        parts = half.split(g, f"{name}/Split", rows(name, qkv), [width] * 3)
        q, k, v = (
            half.heads(g, f"{name}/{part}", x, count, size)
            for part, x in zip("qkv", parts, strict=True)
        )
        q = self._scaled(g, name, half.rotate(g, f"{name}/q/rope", q, cos, sin, size), size)
        k = half.rotate(g, f"{name}/k/rope", k, cos, sin, size)
        scores = _scores(g, f"{name}/scores", q, k)
        if windowed:
            mask = g.once(
                "window mask", lambda: half.unsqueeze(g, "/windows/Mask", "window_mask", 1, 2)
            )
            scores = g.node("Where", [mask, scores, self._lowest(g)], f"{name}/Where")
        weights = g.node("Softmax", [scores], f"{name}/Softmax", axis=-1)
        out = g.node("MatMul", [weights, v], f"{name}/MatMul")
        merged = half.merge_heads(g, f"{name}/merge", out, width)
        if windowed:
            return half.leave_windows(g, f"{name}/leave", merged, width)
        return reshape(g, f"{name}/Reshape", merged, (-1, width))

    def _attend(
        self,
        g: Graph,
        name: str,
        q: str,
        past: list[str],
        new: tuple[str, str],
        length: int,
        repeats: int,
    ) -> str:
        old_mask = g.once("past mask", lambda: _past_mask(g, "/past_mask", length))
        new_mask = g.once("new mask", lambda: _causal_mask(g, "/new_mask", repeats))
        masked = [
            g.node(
                "Where",
                [mask, _scores(g, f"{name}/{part}", q, key), self._lowest(g)],
                f"{name}/{part}/Where",
            )
            for part, key, mask in (("past", past[0], old_mask), ("new", new[0], new_mask))
        ]
        scores = g.node("Concat", masked, f"{name}/Concat", axis=-1)  # [B, HK, rep * S, L + S]
        weights = g.node("Softmax", [scores], f"{name}/Softmax", axis=-1)
        zero, cut, end, axis = (g.constant(np.array([n], np.int64)) for n in (0, length, 2**62, 3))
        old = g.node("Slice", [weights, zero, cut, axis], f"{name}/past/Slice")
        own = g.node("Slice", [weights, cut, end, axis], f"{name}/new/Slice")
        old = g.node("MatMul", [old, past[1]], f"{name}/past/Values")
        own = g.node("MatMul", [own, new[1]], f"{name}/new/Values")
        return g.node("Add", [old, own], f"{name}/Add")

    def _scaled(self, g: Graph, name: str, q: str, size: int) -> str:
        # before the product, not after: raw scores of a large model leave fp16
        scale = g.constant(np.full(1, size**-0.5, self.dtype))
        return g.node("Mul", [q, scale], f"{name}/q/Scale")

    def _lowest(self, g: Graph) -> str:
        return g.constant(np.full(1, np.finfo(self.dtype).min, self.dtype))


def _scores(g: Graph, name: str, q: str, k: str) -> str:
    turned = g.node("Transpose", [k], f"{name}/Transpose", perm=[0, 1, 3, 2])
    return g.node("MatMul", [q, turned], f"{name}/MatMul")


def _rope_rows(g: Graph, name: str, table: str) -> str:
    """[B, 1, S, D / 2]: this token's row of the table."""
    rows = g.node("Gather", [table, "position_ids"], f"{name}/Gather", axis=0)
    return half.unsqueeze(g, f"{name}/Unsqueeze", rows, 1)


def _past_mask(g: Graph, name: str, length: int) -> str:
    """[B, 1, 1, L]: what was in the cache before this run."""
    start = half.unsqueeze(g, f"{name}/Unsqueeze", "write_indices", 1, 2, 3)
    places = g.constant(np.arange(length, dtype=np.int64).reshape(1, 1, 1, -1))
    return g.node("Less", [places, start], f"{name}/Less")


def _causal_mask(g: Graph, name: str, repeats: int) -> str:
    """[rep * S, S]: new token s sees new tokens 0 .. s, the same for each head of a group."""
    positions = half.sequence_positions(g, name)
    times = g.constant(np.array([repeats], np.int64))
    rows = half.unsqueeze(g, f"{name}/Rows", g.node("Tile", [positions, times], f"{name}/Tile"), 1)
    columns = half.unsqueeze(g, f"{name}/Columns", positions, 0)
    return g.node("LessOrEqual", [columns, rows], f"{name}/LessOrEqual")
