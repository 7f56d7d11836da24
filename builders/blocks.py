"""The blocks that every family's graph is made of; a lowering spells each for one executor.

A block appends nodes to a `Graph` and returns the names of its results. `name` is the path of
its nodes ("/layers.0/attn"); weights are arrays, never names. Graph inputs are used by the names
of builders/tensors.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from builders.graph import Graph
from builders.quantize import QuantizedWeight
from builders.rows import Rows
from builders.tensors import Interface
from edgevlm.config import HiddenAct, Limits, TextConfig, VisionConfig
from edgevlm.memory_plan import DType

Array = NDArray[np.float32]
Linear = Array | Rows | QuantizedWeight  # [N, K], as checkpoints have it
HeadNorms = tuple[Array, Array]  # weights [D] of the RMSNorm over each head of q, and of k
WeightsName = Literal["int4", "fp16", "fp32"]


@dataclass(frozen=True)
class WeightPolicy:
    """How the text model's matrices are stored. `group_size` is what INT4 uses where K allows."""

    weights: WeightsName = "int4"
    group_size: int = 128


class Lowering(Protocol):
    """S = sequence_length, B = batch_size, N = num_patches, C = vision hidden_size.

    | block | x | result |
    |---|---|---|
    | linear, weight [N, K] | [..., K] | [..., N] |
    | rms_norm, layer_norm, activation | [..., K] | [..., K] |
    | add_rms_norm, add_layer_norm | [..., K] twice | normed [..., K], sum [..., K] |
    | gated | [..., 2 * size], gate then up | [..., size] |
    | text_attention | [B, S, (HQ + 2 * HK) * D], rows q then k then v | [B, S, HQ * D] |
    | vision_attention | [N, 3 * C], rows q then k then v | [N, C] |

    text_attention norms the heads of q and k where it is given `norms`, rotates them, writes k and
    v into the cache at `write_indices`, and attends causally; it makes the graph outputs
    `present.N.*` that `text_interface` declares.
    vision_attention rotates q and k by vision_cos and vision_sin; `windowed`: within windows only.
    """

    @property
    def name(self) -> str:
        """ "host", "native" or "classic"."""
        ...

    @property
    def dtype(self) -> DType:
        """Of activations, caches and float inputs."""
        ...

    @property
    def opset(self) -> int:
        """ONNX opset of the graphs."""
        ...

    @property
    def ir_version(self) -> int:
        """ONNX IR version of the graphs."""
        ...

    def text_interface(self, text: TextConfig, limits: Limits) -> Interface:
        """Inputs and outputs of the language model's graph."""
        ...

    def vision_interface(self, vision: VisionConfig) -> Interface:
        """Inputs and outputs of the vision graph."""
        ...

    def linear(
        self, g: Graph, name: str, x: str, weight: Linear, bias: Array | None = None
    ) -> str: ...

    def rms_norm(self, g: Graph, name: str, x: str, weight: Array, eps: float) -> str: ...

    def add_rms_norm(
        self, g: Graph, name: str, x: str, residual: str, weight: Array, eps: float
    ) -> tuple[str, str]: ...

    def layer_norm(
        self, g: Graph, name: str, x: str, weight: Array, bias: Array, eps: float
    ) -> str: ...

    def add_layer_norm(
        self, g: Graph, name: str, x: str, residual: str, weight: Array, bias: Array, eps: float
    ) -> tuple[str, str]: ...

    def activation(self, g: Graph, name: str, x: str, kind: HiddenAct) -> str: ...

    def gated(self, g: Graph, name: str, gate_up: str, size: int, kind: HiddenAct) -> str: ...

    def text_attention(
        self,
        g: Graph,
        name: str,
        qkv: str,
        layer: int,
        text: TextConfig,
        limits: Limits,
        norms: HeadNorms | None = None,
    ) -> str: ...

    def vision_attention(
        self, g: Graph, name: str, qkv: str, vision: VisionConfig, windowed: bool
    ) -> str: ...


def reshape(g: Graph, name: str, x: str, shape: Sequence[int]) -> str:
    """Reshape with 0 = keep and -1 = infer."""
    return g.node("Reshape", [x, g.constant(np.array(shape, np.int64))], name)


def cast(g: Graph, name: str, x: str, dtype: DType) -> str:
    """Cast to a dtype."""
    return g.node("Cast", [x], name, to=g.onnx_dtype(dtype))


def last_position(g: Graph, name: str, x: str) -> str:
    """[B, S, K] -> [B, 1, K]: the head looks at the newest token only."""
    start, end, axis = (g.constant(np.array([v], np.int64)) for v in (-1, 2**62, 1))
    return g.node("Slice", [x, start, end, axis], name)


def as_float32(values: Any) -> Array:
    """Contiguous float32, without a copy where it is that already."""
    return np.ascontiguousarray(values, dtype=np.float32)
