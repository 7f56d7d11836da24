"""The vision tower of Qwen2-VL, 2.5-VL and 3-VL: one graph, or a chain of stages of whole blocks.

Patches keep the order of pixel_values; a windowed block gathers its windows and puts them back.

| tensor | shape |
|---|---|
| pixel_values | [num_patches, patch_dim] |
| hidden, vision_states.N | [num_patches, hidden_size] |
| pos_embed_index, pos_embed_weight | [num_patches, 4] |
| image_features, deepstack_features.N | [num_patches / merge^2, out_hidden_size] |
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from builders.blocks import Lowering, reshape
from builders.decoder import GraphFile
from builders.graph import Graph
from builders.quantize import check_fp16_range
from builders.rows import rows_of
from builders.tensors import POSITION_TAPS, vision_hidden_states
from builders.weights import WeightSource
from edgevlm.bundle import TensorSpec
from edgevlm.config import VisionConfig

NORM_EPS = 1e-6  # transformers' Qwen2VLVisionBlock and its successors, and their PatchMerger


@dataclass(frozen=True)
class VisionPart:
    """Blocks `first` up to `end`; the merger belongs to the part that ends with the last block."""

    first: int
    end: int


def vision_graph(
    lowering: Lowering,
    source: WeightSource,
    vision: VisionConfig,
    path: Path,
    part: VisionPart | None = None,
) -> GraphFile:
    """Write the tower, or one stage of it."""
    part = part or VisionPart(0, vision.depth)
    inputs, outputs = vision_border(lowering, vision, part)
    tower = _Tower(lowering, source, vision)
    with Graph(path, lowering.opset, lowering.ir_version) as g:
        for spec in inputs:
            g.input(spec)
        for spec in outputs:
            g.output(spec)
        if part.first == 0:
            hidden = tower.patch_embed(g)
        else:
            hidden = f"vision_states.{part.first}"
        branch: str | None = None
        for block in range(part.first, part.end):
            hidden, branch = tower.block(g, block, hidden, branch)
            if block in vision.deepstack_visual_indexes:
                hidden = g.node("Add", [branch, hidden], f"/blocks.{block}/Add")
                branch = None
                tower.deepstack(g, vision.deepstack_visual_indexes.index(block), hidden)
        if part.end == vision.depth:
            tower.merger(g, hidden, branch)
        else:
            name = f"vision_states.{part.end}"
            last = ("Identity", [hidden]) if branch is None else ("Add", [branch, hidden])
            g.node(*last, f"/{name}", output=name)
        g.save()
        return GraphFile(path, inputs, outputs, g.weight_bytes())


def vision_border(
    lowering: Lowering, vision: VisionConfig, part: VisionPart
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of a part of the tower."""
    whole = lowering.vision_interface(vision)
    inputs = list(whole.inputs)
    if part.first > 0:
        inputs[0] = vision_hidden_states(vision, part.first, lowering.dtype)
        inputs = [spec for spec in inputs if not spec.name.startswith("pos_embed_")]
    if not has_windows(vision, part):
        inputs = [spec for spec in inputs if not spec.name.startswith("window_")]
    last, *deep = whole.outputs
    if part.end < vision.depth:
        last = vision_hidden_states(vision, part.end, lowering.dtype)
    blocks = zip(deep, vision.deepstack_visual_indexes, strict=True)
    outputs = [spec for spec, block in blocks if part.first <= block < part.end]
    return tuple(inputs), (last, *outputs)


def has_windows(vision: VisionConfig, part: VisionPart) -> bool:
    """Whether some block of a part attends within windows."""
    return any(_windowed(vision, block) for block in range(part.first, part.end))


def _windowed(vision: VisionConfig, block: int) -> bool:
    return vision.window_size is not None and block not in vision.fullatt_block_indexes


class _Tower:
    """Writes the tower's parts; every weight is read when its node is written."""

    def __init__(self, lowering: Lowering, source: WeightSource, vision: VisionConfig) -> None:
        self.lowering, self.source, self.vision = lowering, source, vision
        self.gated = vision.model_type == "qwen2_5_vl"

    def patch_embed(self, g: Graph) -> str:
        """The convolution's stride is its kernel, so it is one product per patch."""
        at = "visual.patch_embed.proj"
        kernel = self.source.tensor(f"{at}.weight")
        weight = kernel.reshape(self.vision.hidden_size, self.vision.patch_dim)
        if self.vision.num_position_embeddings is None:
            return self.lowering.linear(g, "/patch_embed", "pixel_values", weight)
        bias = self.source.tensor(f"{at}.bias")
        x = self.lowering.linear(g, "/patch_embed", "pixel_values", weight, bias)
        return self._positions(g, x)

    def _positions(self, g: Graph, x: str) -> str:
        """x plus rows of the learned table, one tap after the other: no [N, 4, C] in between."""
        name, dtype = "visual.pos_embed.weight", self.lowering.dtype
        values = self.source.tensor(name)
        if dtype == "float16":
            check_fp16_range(values, name)
        table = g.weight("/pos_embed/weight", values.astype(dtype))
        for tap in range(POSITION_TAPS):
            path, place = f"/pos_embed/{tap}", g.constant(np.array(tap, np.int64))
            column = g.constant(np.array([tap], np.int64))
            index = g.node("Gather", ["pos_embed_index", place], f"{path}/index", axis=1)
            weight = g.node("Gather", ["pos_embed_weight", column], f"{path}/weight", axis=1)
            rows = g.node("Gather", [table, index], f"{path}/rows", axis=0)
            rows = g.node("Mul", [rows, weight], f"{path}/Mul")
            x = g.node("Add", [x, rows], f"{path}/Add")
        return x

    def block(self, g: Graph, block: int, hidden: str, branch: str | None) -> tuple[str, str]:
        """One block on `hidden + branch`; (hidden, branch) again, whose sum is its output."""
        at, path = f"visual.blocks.{block}", f"/blocks.{block}"
        normed, hidden = self._norm(g, f"{path}/norm1", f"{at}.norm1", hidden, branch)
        qkv = self._linear(g, f"{path}/attn/qkv", f"{at}.attn.qkv", normed)
        windowed = _windowed(self.vision, block)
        y = self.lowering.vision_attention(g, f"{path}/attn", qkv, self.vision, windowed)
        y = self._linear(g, f"{path}/attn/proj", f"{at}.attn.proj", y)
        normed, hidden = self._norm(g, f"{path}/norm2", f"{at}.norm2", hidden, y)
        return hidden, self._mlp(g, f"{path}/mlp", f"{at}.mlp", normed)

    def merger(self, g: Graph, hidden: str, branch: str | None) -> None:
        """Norm each patch, put merge x merge of them side by side, two layers."""
        vision = self.vision
        normed, _ = self._norm(g, "/merger/ln_q", "visual.merger.ln_q", hidden, branch)
        width = vision.hidden_size * vision.spatial_merge_size**2
        x = reshape(g, "/merger/side_by_side", normed, [-1, width])
        self._merge(g, "/merger", "visual.merger", x, "image_features")

    def deepstack(self, g: Graph, number: int, hidden: str) -> None:
        """A merger on a block's output; here what lies side by side is normed together."""
        vision = self.vision
        path, at = f"/deepstack.{number}", f"visual.deepstack_merger_list.{number}"
        width = vision.hidden_size * vision.spatial_merge_size**2
        x = reshape(g, f"{path}/side_by_side", hidden, [-1, width])
        x, _ = self._norm(g, f"{path}/ln_q", f"{at}.ln_q", x, None)
        self._merge(g, path, at, x, f"deepstack_features.{number}")

    def _merge(self, g: Graph, path: str, at: str, x: str, output: str) -> None:
        x = self._linear(g, f"{path}/mlp.0", f"{at}.mlp.0", x)
        x = self.lowering.activation(g, f"{path}/mlp.1", x, "gelu")
        x = self._linear(g, f"{path}/mlp.2", f"{at}.mlp.2", x)
        g.node("Identity", [x], f"/{output}", output=output)

    def _mlp(self, g: Graph, path: str, at: str, x: str) -> str:
        if not self.gated:
            x = self._linear(g, f"{path}/fc1", f"{at}.fc1", x)
            x = self.lowering.activation(g, f"{path}/act", x, self.vision.hidden_act)
            return self._linear(g, f"{path}/fc2", f"{at}.fc2", x)
        # Gate and up stay two products: for a picture's many rows a split is only a copy.
        gate = self._linear(g, f"{path}/gate_proj", f"{at}.gate_proj", x)
        up = self._linear(g, f"{path}/up_proj", f"{at}.up_proj", x)
        gate = self.lowering.activation(g, f"{path}/act", gate, self.vision.hidden_act)
        return self._linear(
            g, f"{path}/down_proj", f"{at}.down_proj", g.node("Mul", [gate, up], f"{path}/Mul")
        )

    def _linear(self, g: Graph, path: str, at: str, x: str) -> str:
        weight, bias = rows_of(self.source, f"{at}.weight"), self.source.tensor(f"{at}.bias")
        return self.lowering.linear(g, path, x, weight, bias)

    def _norm(self, g: Graph, path: str, at: str, x: str, branch: str | None) -> tuple[str, str]:
        """(normed, sum) of x + branch; RMSNorm in Qwen2.5-VL, LayerNorm in the others."""
        weight = self.source.tensor(f"{at}.weight")
        if not self.gated:
            bias = self.source.tensor(f"{at}.bias")
            if branch is None:
                return self.lowering.layer_norm(g, path, x, weight, bias, NORM_EPS), x
            return self.lowering.add_layer_norm(g, path, branch, x, weight, bias, NORM_EPS)
        if branch is None:
            return self.lowering.rms_norm(g, path, x, weight, NORM_EPS), x
        return self.lowering.add_rms_norm(g, path, branch, x, weight, NORM_EPS)
