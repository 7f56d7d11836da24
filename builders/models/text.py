"""The decoder that the llama and qwen families share: its config and its tensors."""

from __future__ import annotations

from builders.config_reader import ConfigReader
from edgevlm.config import Llama3RopeScaling, RopeConfig, TextConfig
from edgevlm.errors import UnsupportedCheckpoint


def read_text(
    root: ConfigReader,
    model_type: str,
    *,
    attention_bias: bool,
    default_theta: float,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    interleaved: bool = False,
    deepstack: int = 0,
) -> TextConfig:
    """The decoder's config from a flat config.json, or from its `text_config` (transformers 5).

    `default_head_dim` None: hidden_size / num_attention_heads. `interleaved`: how the family
    lays out its mrope_section.
    """
    text = root.section("text_config") if "text_config" in root else root
    text.require("hidden_act", "silu")
    hidden_size, heads = text.int("hidden_size"), text.int("num_attention_heads")
    kv_heads = text.int("num_key_value_heads", heads)
    if "head_dim" not in text and default_head_dim is None and hidden_size % heads:
        raise UnsupportedCheckpoint(
            f"{text.where} has hidden_size {hidden_size}, not a multiple of "
            f"num_attention_heads {heads}, and no head_dim; correct the file"
        )
    if heads % kv_heads:
        raise UnsupportedCheckpoint(
            f"{text.where} has num_attention_heads {heads}, not a multiple of "
            f"num_key_value_heads {kv_heads}; correct the file"
        )
    head_dim = text.int("head_dim", default_head_dim or hidden_size // heads)
    _refuse_sliding_window(text)
    return TextConfig(
        model_type=model_type,
        vocab_size=text.int("vocab_size"),
        hidden_size=hidden_size,
        num_hidden_layers=text.int("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=text.int("intermediate_size"),
        rms_norm_eps=text.float("rms_norm_eps", 1e-6),
        rope=read_rope(text, head_dim, default_theta, interleaved),
        # transformers 5 writes it at the root, 4.5x wrote it in text_config
        tie_word_embeddings=root.bool("tie_word_embeddings", False)
        or text.bool("tie_word_embeddings", False),
        attention_bias=attention_bias,
        max_position_embeddings=text.int("max_position_embeddings"),
        qk_norm=qk_norm,
        deepstack=deepstack,
    )


def read_rope(
    text: ConfigReader, head_dim: int, default_theta: float, interleaved: bool = False
) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_scaling`; M-RoPE is keyed on mrope_section."""
    key = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    rope = text.section(key) if key in text else ConfigReader({}, f"{text.where}: {key}")
    for reader in (text, rope):
        reader.require("partial_rotary_factor", 1.0, 1, default=1.0)
    theta = rope.float("rope_theta", text.float("rope_theta", default_theta))
    kind_key = "type" if "type" in rope and "rope_type" not in rope else "rope_type"
    section = rope.ints("mrope_section", None)
    if section is not None:
        # transformers 4 writes type mrope, 5 writes default; both mean the sections
        rope.require(kind_key, "default", "mrope", default="default")
        rope.require("mrope_interleaved", interleaved, default=interleaved)
        if len(section) != 3 or sum(section) * 2 != head_dim:
            raise rope.mistyped(
                "mrope_section", list(section), f"three sizes that sum to {head_dim // 2}"
            )
        return RopeConfig(theta, "mrope_interleaved" if interleaved else "mrope", section)
    if rope.require(kind_key, "default", "llama3", default="default") == "default":
        return RopeConfig(theta)
    scaling = Llama3RopeScaling(
        factor=rope.float("factor"),
        low_freq_factor=rope.float("low_freq_factor"),
        high_freq_factor=rope.float("high_freq_factor"),
        original_max_position_embeddings=rope.int("original_max_position_embeddings"),
    )
    return RopeConfig(theta, scaling=scaling)


def _refuse_sliding_window(text: ConfigReader) -> None:
    """Sliding attention is refused where some layer would see less than the whole context."""
    layers, context = text.int("num_hidden_layers"), text.int("max_position_embeddings")
    window = text.int("sliding_window", None)
    if "layer_types" in text:
        kinds = set(text.value("layer_types"))
        if strange := sorted(kinds - {"full_attention", "sliding_attention"}):
            raise text.mistyped("layer_types", strange[0], "full_attention in every layer")
        slides = "sliding_attention" in kinds
    else:
        slides = text.bool("use_sliding_window", False) and window is not None
        slides = slides and text.int("max_window_layers", 0, minimum=0) < layers
    if slides and (window is None or window < context):
        raise UnsupportedCheckpoint(
            f"{text.where} lets layers see a sliding_window {window} of max_position_embeddings "
            f"{context}, which is not supported; use a checkpoint of full attention"
        )


def text_shapes(text: TextConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder by canonical name; lm_head only where it is not tied."""
    hidden, mlp = text.hidden_size, text.intermediate_size
    q, kv = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (text.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(text.num_hidden_layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, hidden)
            if text.attention_bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        if text.qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"{at}self_attn.{name}.weight"] = (text.head_dim,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, q)
        shapes[at + "mlp.gate_proj.weight"] = (mlp, hidden)
        shapes[at + "mlp.up_proj.weight"] = (mlp, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, mlp)
    if not text.tie_word_embeddings:
        shapes["lm_head.weight"] = (text.vocab_size, hidden)
    return shapes


def require_mrope(root: ConfigReader, text: TextConfig) -> None:
    """The vision families place image tokens in three dimensions: without sections, refused."""
    if text.rope.mrope_section is None:
        raise UnsupportedCheckpoint(
            f"{root.where} has no mrope_section in rope_scaling or rope_parameters, "
            f"which {text.model_type} needs; correct the file"
        )
