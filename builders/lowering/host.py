"""Blocks as ONNX Runtime's CPU kernels take them: fp32 activations, fused where a kernel exists.

Figures behind the choices are in docs/host-lowering.md.
"""

import numpy as np

from builders.blocks import Array, HeadNorms, Linear, as_float32, reshape
from builders.graph import MICROSOFT, Graph
from builders.quantize import QuantizedWeight
from builders.rows import as_rows
from builders.tensors import Interface, text_interface, vision_interface
from edgevlm.config import HiddenAct, Limits, TextConfig, VisionConfig
from edgevlm.memory_plan import DType

QUICK_GELU_ALPHA = 1.702
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: the only one with kernels faster than fp32


class HostLowering:
    """See `Lowering` for the blocks."""

    name = "host"
    dtype: DType = "float32"
    opset = 21
    ir_version = 10

    def text_interface(self, text: TextConfig, limits: Limits) -> Interface:
        """Inputs and outputs of the language model's graph."""
        return text_interface(text, limits, self.dtype)

    def vision_interface(self, vision: VisionConfig) -> Interface:
        """Inputs and outputs of the vision graph."""
        return vision_interface(vision, self.dtype)

    def linear(self, g: Graph, name: str, x: str, weight: Linear, bias: Array | None = None) -> str:
        """INT4: one MatMulNBits that adds the bias too. Float: MatMul on the transposed weight."""
        if isinstance(weight, QuantizedWeight):
            return _matmul_nbits(g, name, x, weight, bias)
        w = g.transposed(f"{name}/weight", as_rows(weight), self.dtype)
        y = g.node("MatMul", [x, w], f"{name}/MatMul")
        if bias is None:
            return y
        return g.node("Add", [y, g.weight(f"{name}/bias", as_float32(bias))], f"{name}/Add")

    def rms_norm(self, g: Graph, name: str, x: str, weight: Array, eps: float) -> str:
        """One kernel, which ONNX Runtime registers in the default domain."""
        w = g.weight(f"{name}/weight", as_float32(weight))
        return g.node("SimplifiedLayerNormalization", [x, w], name, axis=-1, epsilon=eps)

    def add_rms_norm(
        self, g: Graph, name: str, x: str, residual: str, weight: Array, eps: float
    ) -> tuple[str, str]:
        """Sum and norm in one pass."""
        inputs = [x, residual, g.weight(f"{name}/weight", as_float32(weight))]
        return _skip_norm(g, "SkipSimplifiedLayerNormalization", name, inputs, eps)

    def layer_norm(
        self, g: Graph, name: str, x: str, weight: Array, bias: Array, eps: float
    ) -> str:
        """The standard operator."""
        w = g.weight(f"{name}/weight", as_float32(weight))
        b = g.weight(f"{name}/bias", as_float32(bias))
        return g.node("LayerNormalization", [x, w, b], name, axis=-1, epsilon=eps)

    def add_layer_norm(
        self, g: Graph, name: str, x: str, residual: str, weight: Array, bias: Array, eps: float
    ) -> tuple[str, str]:
        """Sum and norm in one pass."""
        w = g.weight(f"{name}/weight", as_float32(weight))
        b = g.weight(f"{name}/bias", as_float32(bias))
        return _skip_norm(g, "SkipLayerNormalization", name, [x, residual, w, b], eps)

    def activation(self, g: Graph, name: str, x: str, kind: HiddenAct) -> str:
        """SiLU is QuickGelu with alpha 1."""
        if kind in ("gelu", "gelu_pytorch_tanh"):
            op = "Gelu" if kind == "gelu" else "FastGelu"
            return g.node(op, [x], name, domain=MICROSOFT)
        alpha = 1.0 if kind == "silu" else QUICK_GELU_ALPHA
        return g.node("QuickGelu", [x], name, domain=MICROSOFT, alpha=alpha)

    def gated(self, g: Graph, name: str, gate_up: str, size: int, kind: HiddenAct) -> str:
        """act(gate) * up."""
        sizes = g.constant(np.array([size, size], np.int64))
        gate, up = g.nodes("Split", [gate_up, sizes], f"{name}/Split", 2, axis=-1)
        return g.node("Mul", [self.activation(g, f"{name}/act", gate, kind), up], f"{name}/Mul")

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
        """One GroupQueryAttention: it splits, rotates, writes the cache in place and attends.

        Where heads are normed it gets q, k and v apart; ONNX Runtime before 1.32 cannot norm in it.
        """
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        present = [f"present.{layer}.{part}" for part in ("key", "value")]
        lengths, total = g.once("seqlens_k", lambda: _lengths(g)), "/lengths/total/output_0"
        rope = ["rope_cos", "rope_sin", "position_ids"]
        rows = [qkv, "", ""] if norms is None else self._normed(g, name, qkv, text, norms)
        output, _, _ = g.nodes(
            "GroupQueryAttention",
            [*rows, *past, lengths, total, *rope],
            name,
            [f"{name}/output_0", *present],
            MICROSOFT,
            num_heads=text.num_attention_heads,
            kv_num_heads=text.num_key_value_heads,
            scale=text.head_dim**-0.5,
            do_rotary=1,
            rotary_interleaved=0,
        )
        return output

    def _normed(
        self, g: Graph, name: str, qkv: str, text: TextConfig, norms: HeadNorms
    ) -> list[str]:
        """q, k and v, the heads of q and k normed."""
        widths = [
            heads * text.head_dim
            for heads in (text.num_attention_heads, *[text.num_key_value_heads] * 2)
        ]
        parts = g.nodes(
            "Split", [qkv, g.constant(np.array(widths, np.int64))], f"{name}/Split", 3, axis=-1
        )
        for i, (part, weight) in enumerate(zip("qk", norms, strict=True)):
            at = f"{name}/{part}_norm"
            heads = reshape(g, f"{at}/heads", parts[i], [0, 0, -1, text.head_dim])
            normed = self.rms_norm(g, at, heads, weight, text.rms_norm_eps)
            parts[i] = reshape(g, f"{at}/rows", normed, [0, 0, widths[i]])
        return parts

    def vision_attention(
        self, g: Graph, name: str, qkv: str, vision: VisionConfig, windowed: bool
    ) -> str:
        """MultiHeadAttention, whose memory is linear in patches where it is given no mask."""
        width = vision.hidden_size
        x = reshape(g, f"{name}/batch", qkv, [1, -1, 3 * width])
        sizes = g.constant(np.array([width] * 3, np.int64))
        q, k, v = g.nodes("Split", [x, sizes], f"{name}/Split", 3, axis=-1)
        q, k = (_rotate(g, f"{name}/{part}_rope", y) for part, y in (("q", q), ("k", k)))
        mask = []
        if windowed:
            q, k, v = (
                _to_windows(g, f"{name}/{part}_windows", y, width)
                for part, y in (("q", q), ("k", k), ("v", v))
            )
            mask = ["", g.once("window_mask", lambda: _window_mask(g))]
        y = g.node(
            "MultiHeadAttention",
            [q, k, v, *mask],
            f"{name}/attention",
            domain=MICROSOFT,
            num_heads=vision.num_heads,
            scale=vision.head_dim**-0.5,
        )
        y = reshape(g, f"{name}/rows", y, [-1, width])
        if windowed:
            y = g.node("Gather", [y, "window_position"], f"{name}/from_windows", axis=0)
        return y


def _matmul_nbits(g: Graph, name: str, x: str, weight: QuantizedWeight, bias: Array | None) -> str:
    n, k = weight.shape
    groups = k // weight.group_size
    codes = weight.codes.reshape(n, groups, weight.group_size // 2)
    inputs = [
        x,
        g.weight(f"{name}/codes", codes, packed=True),
        g.weight(f"{name}/scales", as_float32(weight.scales), packed=True),
    ]
    if bias is not None:
        inputs += ["", "", g.weight(f"{name}/bias", as_float32(bias))]
    return g.node(
        "MatMulNBits",
        inputs,
        f"{name}/MatMulNBits",
        domain=MICROSOFT,
        K=k,
        N=n,
        bits=4,
        block_size=weight.group_size,
        accuracy_level=INT8_ACTIVATIONS,
    )


def _skip_norm(g: Graph, op: str, name: str, inputs: list[str], eps: float) -> tuple[str, str]:
    outputs = [f"{name}/output_0", "", "", f"{name}/sum"]
    normed, _, _, total = g.nodes(op, inputs, name, outputs, MICROSOFT, epsilon=eps)
    return normed, total


def _lengths(g: Graph) -> str:
    """[B] int32: index of each sequence's last token; beside it the longest length, a scalar."""
    shape = g.node("Shape", ["position_ids"], "/lengths/shape", start=1, end=2)
    one = g.constant(np.array([1], np.int64))
    new = g.node("Sub", [shape, one], "/lengths/new")
    last = g.node("Add", ["write_indices", new], "/lengths/last")
    longest = g.node("ReduceMax", [last], "/lengths/longest", keepdims=0)
    total = g.node("Add", [longest, g.constant(np.array(1, np.int64))], "/lengths/count")
    g.node("Cast", [total], "/lengths/total", to=g.onnx_dtype("int32"))
    return g.node("Cast", [last], "/lengths/seqlens_k", to=g.onnx_dtype("int32"))


def _rotate(g: Graph, name: str, x: str) -> str:
    """Rows of the table are the patches in order, so positions count from 0."""
    start = g.constant(np.array([0], np.int64))
    return g.node("RotaryEmbedding", [x, start, "vision_cos", "vision_sin"], name, domain=MICROSOFT)


def _to_windows(g: Graph, name: str, x: str, width: int) -> str:
    """[1, N, C] -> [num_windows, P, C]."""
    rows = reshape(g, f"{name}/rows", x, [-1, width])
    return g.node("Gather", [rows, "window_index"], name, axis=0)


def _window_mask(g: Graph) -> str:
    """[num_windows, P] int32: 1 where a window's place holds a patch."""
    return g.node("Cast", ["window_mask"], "/window_mask", to=g.onnx_dtype("int32"))
