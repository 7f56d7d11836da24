"""What the two TensorRT lowerings spell alike: sums, gates, rotations, the masks' parts.

Written in operators of opset 17-20 that JetPack 6's parser has too. Everything keeps the dtype
of its input, but norms, whose statistics are fp32: squares of fp16 overflow at 256.
"""

import numpy as np

from builders.blocks import Array, Linear, cast, reshape
from builders.graph import Graph
from builders.quantize import QuantizedWeight, check_fp16_range, checked_fp16
from builders.rows import as_rows, mapped
from edgevlm.config import HiddenAct
from edgevlm.memory_plan import DType

INT4_BITS = 4


def float_weight(g: Graph, name: str, values: Array, dtype: DType) -> str:
    """An initializer in the graph's dtype. Raises UnsupportedCheckpoint beyond fp16's range."""
    if dtype == "float16":
        check_fp16_range(values, name)
    return g.weight(name, np.ascontiguousarray(values, dtype=dtype))


def int4_weight(g: Graph, name: str, weight: QuantizedWeight, dtype: DType) -> tuple[str, str]:
    """Codes [N, K] and scales [N, K / group_size] as initializers."""
    codes = g.int4(f"{name}/codes", weight.codes, weight.shape)
    scales = g.weight(f"{name}/scales", weight.scales.astype(dtype), packed=True)
    return codes, scales


def matmul(
    g: Graph, name: str, x: str, weight: Linear, bias: Array | None, dtype: DType, dequantize: str
) -> str:
    """x times the transposed weight; `dequantize` is the operator, with its domain before a dot."""
    if isinstance(weight, QuantizedWeight):
        codes, scales = int4_weight(g, f"{name}/weight", weight, dtype)
        domain, _, op = dequantize.rpartition(".")
        dense = g.node(
            op,
            [codes, scales],
            f"{name}/{op}",
            domain=domain,
            axis=1,
            block_size=weight.group_size,
        )
        # [N, K] as checkpoints have it: the compiler takes the transpose into the product
        rhs = g.node("Transpose", [dense], f"{name}/Transpose", perm=[1, 0])
    else:
        rows, at = as_rows(weight), f"{name}/weight"
        if dtype == "float16":
            rows = mapped(rows, lambda band: checked_fp16(band, at))
        rhs = g.transposed(at, rows, dtype)
    y = g.node("MatMul", [x, rhs], f"{name}/MatMul")
    if bias is None:
        return y
    return g.node("Add", [y, float_weight(g, f"{name}/bias", bias, dtype)], f"{name}/Add")


def rms_norm(g: Graph, name: str, x: str, weight: Array, eps: float, dtype: DType) -> str:
    """RMSNorm from primitives, statistics in fp32."""
    wide = x if dtype == "float32" else cast(g, f"{name}/Cast", x, "float32")
    square = g.node("Mul", [wide, wide], f"{name}/Square")
    axes = g.constant(np.array([-1], np.int64))
    mean = g.node("ReduceMean", [square, axes], f"{name}/ReduceMean", keepdims=1)
    shifted = g.node("Add", [mean, g.constant(np.float32(eps).reshape(1))], f"{name}/AddEps")
    root = g.node("Sqrt", [shifted], f"{name}/Sqrt")
    normed = g.node("Div", [wide, root], f"{name}/Div")
    if dtype != "float32":
        normed = cast(g, f"{name}/CastBack", normed, dtype)
    scale = float_weight(g, f"{name}/weight", weight, dtype)
    return g.node("Mul", [normed, scale], f"{name}/Mul")


def layer_norm(
    g: Graph, name: str, x: str, weight: Array, bias: Array, eps: float, dtype: DType
) -> str:
    """LayerNormalization; stash_type 1 keeps its statistics in fp32."""
    scale = float_weight(g, f"{name}/weight", weight, dtype)
    shift = float_weight(g, f"{name}/bias", bias, dtype)
    return g.node(
        "LayerNormalization",
        [x, scale, shift],
        f"{name}/LayerNormalization",
        axis=-1,
        epsilon=eps,
        stash_type=1,
    )


def activation(g: Graph, name: str, x: str, kind: HiddenAct, dtype: DType) -> str:
    """silu, quick_gelu, gelu or gelu by tanh."""
    if kind == "gelu":
        return g.node("Gelu", [x], f"{name}/Gelu")
    if kind == "gelu_pytorch_tanh":
        return g.node("Gelu", [x], f"{name}/Gelu", approximate="tanh")
    inner = x
    if kind == "quick_gelu":
        factor = g.constant(np.full(1, 1.702, dtype))
        inner = g.node("Mul", [x, factor], f"{name}/Scale")
    sigmoid = g.node("Sigmoid", [inner], f"{name}/Sigmoid")
    return g.node("Mul", [x, sigmoid], f"{name}/Mul")


def gated(g: Graph, name: str, gate_up: str, size: int, kind: HiddenAct, dtype: DType) -> str:
    """activation(gate) * up."""
    gate, up = split(g, f"{name}/Split", gate_up, [size, size])
    return g.node("Mul", [activation(g, f"{name}/act", gate, kind, dtype), up], f"{name}/Mul")


def split(g: Graph, name: str, x: str, sizes: list[int]) -> list[str]:
    """Cut the last axis."""
    lengths = g.constant(np.array(sizes, np.int64))
    return g.nodes("Split", [x, lengths], name, len(sizes), axis=-1)


def heads(g: Graph, name: str, x: str, count: int, size: int, output: str | None = None) -> str:
    """[B, S, H * D] -> [B, H, S, D]."""
    rows = reshape(g, f"{name}/Reshape", x, (0, 0, count, size))
    return g.node("Transpose", [rows], f"{name}/Transpose", output, perm=[0, 2, 1, 3])


def merge_heads(g: Graph, name: str, x: str, width: int) -> str:
    """[B, H, S, D] -> [B, S, H * D]."""
    rows = g.node("Transpose", [x], f"{name}/Transpose", perm=[0, 2, 1, 3])
    return reshape(g, f"{name}/Reshape", rows, (0, 0, width))


def unsqueeze(g: Graph, name: str, x: str, *axes: int) -> str:
    """Insert axes of length 1."""
    return g.node("Unsqueeze", [x, g.constant(np.array(axes, np.int64))], name)


def rotate(
    g: Graph, name: str, x: str, cos: str, sin: str, size: int, output: str | None = None
) -> str:
    """Rotate halves of x [B, H, S, size] by cos and sin [B, 1, S, size / 2]."""
    first, second = split(g, f"{name}/Split", x, [size // 2, size // 2])

    def product(a: str, b: str, node: str) -> str:
        return g.node("Mul", [a, b], f"{name}/{node}")

    left = g.node(
        "Sub", [product(first, cos, "Mul_0"), product(second, sin, "Mul_1")], f"{name}/Sub"
    )
    right = g.node(
        "Add", [product(second, cos, "Mul_2"), product(first, sin, "Mul_3")], f"{name}/Add"
    )
    return g.node("Concat", [left, right], f"{name}/Concat", output, axis=-1)


def sequence_positions(g: Graph, name: str) -> str:
    """0, 1, ... sequence_length - 1, as [S]."""
    shape = g.node("Shape", ["position_ids"], f"{name}/Shape", start=1, end=2)
    length = g.node("Squeeze", [shape, g.constant(np.array([0], np.int64))], f"{name}/Squeeze")
    zero, one = g.constant(np.array(0, np.int64)), g.constant(np.array(1, np.int64))
    return g.node("Range", [zero, length, one], f"{name}/Range")


def gather_windows(g: Graph, name: str, x: str) -> str:
    """[N, K] -> [num_windows, P, K]; the holes of a window repeat some patch and are masked."""
    return g.node("Gather", [x, "window_index"], name, axis=0)


def leave_windows(g: Graph, name: str, x: str, width: int) -> str:
    """[num_windows, P, K] -> [N, K], patches in their own order again."""
    flat = reshape(g, f"{name}/Flat", x, (-1, width))
    return g.node("Gather", [flat, "window_position"], f"{name}/Gather", axis=0)
