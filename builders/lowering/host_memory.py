"""How much ONNX Runtime's arena holds between nodes of the host lowering, at its peak.

Fitted to the smallest arena in which a run succeeds (docs/host-lowering.md): what is live at the
widest node, and the holes that narrower tensors leave before it.
"""

from typing import Literal

from builders.tensors import patches_per_window
from edgevlm.config import Limits, ModelConfig, TextConfig, VisionConfig
from edgevlm.positions import max_windows
from edgevlm.preprocess import MAX_ASPECT_RATIO

BASE_BYTES = 1 << 20  # small tensors, rounding, and what kernels ask for beside their outputs
MARGIN = 1.06  # over the fit


def activation_bytes(model: ModelConfig, limits: Limits, patches: int) -> tuple[int, str]:
    """Upper bound in bytes, and its formula: the larger of prefill or decode, and vision."""
    largest, formula = _text_values(model.text, limits)
    if model.vision is not None:
        vision, how = _vision_values(model.vision, patches)
        largest = max(largest, vision)
        formula = f"max({formula}, {how})"
    return _nbytes(largest), f"{BASE_BYTES >> 20} MiB + {MARGIN} x 4 x ({formula})"


def scratch_bytes(
    engine: Literal["llm", "vision"], model: ModelConfig, limits: Limits, patches: int
) -> int:
    """The part of one graph in it."""
    if engine == "llm":
        return _nbytes(_text_values(model.text, limits)[0])
    assert model.vision is not None
    return _nbytes(_vision_values(model.vision, patches)[0])


def _nbytes(values: int) -> int:
    return BASE_BYTES + int(values * 4 * MARGIN)


def _text_values(text: TextConfig, limits: Limits) -> tuple[int, str]:
    """Values for a chunk of prefill, and the scores of one decode step."""
    tokens, row = max(limits.max_prefill_chunk, limits.slots), _text_row(text)
    scores = limits.slots * text.num_attention_heads * limits.max_seq_len
    return tokens * row + scores, f"{tokens} tokens x {row} + {scores} scores"


def _text_row(text: TextConfig) -> int:
    """Values for each token of a chunk: gate and up joined and apart, or q, k, v, and the rest."""
    qkv = (text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim
    return 4 * max(text.intermediate_size, qkv) + 7 * text.hidden_size // 2


def _vision_values(vision: VisionConfig, patches: int) -> tuple[int, str]:
    """Values for the largest picture: linear in patches, and in places of windows."""
    width, mlp = vision.hidden_size, vision.intermediate_size
    products = 2 if vision.window_size is None else 3  # gate and up are products of their own
    row = max(9 * width, products * mlp + 9 * width // 2)
    if vision.window_size is None:
        return patches * row, f"{patches} patches x {row}"
    size = patches_per_window(vision)
    places = max_windows(vision, patches, MAX_ASPECT_RATIO) * size
    place, beside = 8 * width + vision.num_heads * size, 10 * width // 3
    total = max(patches * row, places * place + patches * beside)
    return total, f"{patches} patches x {row} or {places} places x {place} + patches x {beside}"
