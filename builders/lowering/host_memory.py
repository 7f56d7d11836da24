"""How much ONNX Runtime's arena holds between nodes of the host lowering, at its peak."""

from edgevlm.config import Limits, ModelConfig


def activation_bytes(model: ModelConfig, limits: Limits, patches: int) -> tuple[int, str]:
    """Upper bound in bytes, and its formula: the larger of prefill and vision."""
    return 1 << 30, "to be measured"
