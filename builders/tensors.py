"""What crosses the border of each graph: names, dtypes, shapes, and where they lie.

The graph builders declare these tensors, the planner places them; nobody else spells them.
Host and TensorRT differ in `dtype` only.

dims: num_patches, num_image_tokens, num_windows, image_row (vision);
batch_size, sequence_length, row, slot (prefill, decode).
"""

from dataclasses import dataclass

from edgevlm.bundle import IMAGE_ROW, TensorSpec
from edgevlm.config import Limits, ModelConfig, TextConfig, VisionConfig
from edgevlm.memory_plan import DType
from edgevlm.preprocess import max_patches

POSITION_TAPS = 4  # rows of the learned table that make a patch's position

TensorShape = tuple[str, DType, tuple[int, ...]]


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of one graph."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def patches_per_window(vision: VisionConfig) -> int:
    """Patches in one whole attention window."""
    assert vision.window_size is not None
    return (vision.window_size // vision.patch_size) ** 2


def rope_rows(text: TextConfig, limits: Limits) -> int:
    """Rows of the rotary table: one per position, written once at start.

    Where positions are 3-D, one more per token of a prefill chunk, written before that chunk: its
    image tokens have rows of their own. Decode always finds its row by position.
    """
    chunk_rows = limits.max_prefill_chunk if text.rope.scheme != "plain" else 0
    return limits.max_seq_len + chunk_rows


def vision_interface(vision: VisionConfig, dtype: DType) -> Interface:
    """Tensors of the vision graph."""
    inputs = [
        TensorSpec("pixel_values", dtype, ("num_patches", vision.patch_dim), "pixel_values"),
        TensorSpec("vision_cos", dtype, ("num_patches", vision.head_dim // 2), "vision_cos"),
        TensorSpec("vision_sin", dtype, ("num_patches", vision.head_dim // 2), "vision_sin"),
    ]
    if vision.window_size is not None:
        size = patches_per_window(vision)
        inputs += [
            TensorSpec("window_index", "int64", ("num_windows", size), "window_index"),
            TensorSpec("window_mask", "bool", ("num_windows", size), "window_mask"),
            TensorSpec("window_position", "int64", ("num_patches",), "window_position"),
        ]
    if vision.num_position_embeddings is not None:
        taps = ("num_patches", POSITION_TAPS)
        inputs += [
            TensorSpec("pos_embed_index", "int64", taps, "pos_embed_index"),
            TensorSpec("pos_embed_weight", dtype, taps, "pos_embed_weight"),
        ]
    shape = ("num_image_tokens", vision.out_hidden_size)
    features = [TensorSpec("image_features", dtype, shape, "inputs_embeds", IMAGE_ROW)]
    for n in range(len(vision.deepstack_visual_indexes)):
        name, place = f"deepstack_features.{n}", f"deepstack.{n}"
        features.append(TensorSpec(name, dtype, shape, place, IMAGE_ROW))
    return Interface(tuple(inputs), tuple(features))


def text_interface(text: TextConfig, limits: Limits, dtype: DType) -> Interface:
    """Tensors of the language model's graph, the same for prefill and decode."""
    rope = (rope_rows(text, limits), text.head_dim // 2)
    rows = ("batch_size", "sequence_length", text.hidden_size)
    inputs = [
        TensorSpec("inputs_embeds", dtype, rows, "inputs_embeds", "row"),
        TensorSpec("rope_cos", dtype, rope, "rope_cos"),
        TensorSpec("rope_sin", dtype, rope, "rope_sin"),
        TensorSpec("position_ids", "int64", ("batch_size", "sequence_length"), "position_ids"),
        TensorSpec("write_indices", "int64", ("batch_size",), "write_indices"),
    ]
    for layer in range(text.deepstack):
        name = f"deepstack.{layer}"
        inputs.append(TensorSpec(name, dtype, rows, name, "row"))
    cache = ("batch_size", text.num_key_value_heads, limits.max_seq_len, text.head_dim)
    outputs = [TensorSpec("logits", "float32", ("batch_size", 1, text.vocab_size), "logits")]
    for layer in range(text.num_hidden_layers):
        for part in ("key", "value"):
            past = f"past_key_values.{layer}.{part}"
            inputs.append(TensorSpec(past, dtype, cache, past, "slot"))
            # The cache lives where it lived: present is bound to past's address.
            outputs.append(TensorSpec(f"present.{layer}.{part}", dtype, cache, past, "slot"))
    return Interface(tuple(inputs), tuple(outputs))


def classic_text_interface(text: TextConfig, limits: Limits, dtype: DType) -> Interface:
    """The same for graphs that cannot write the cache (TensorRT 10.3).

    `new.N.*` is what the executor copies into past_key_values.N.* at write_indices.
    """
    interface = text_interface(text, limits, dtype)
    new = ("batch_size", text.num_key_value_heads, "sequence_length", text.head_dim)
    outputs = [
        TensorSpec(name, dtype, new, name)
        for name in (spec.name.replace("present.", "new.") for spec in interface.outputs[1:])
    ]
    return Interface(interface.inputs, (interface.outputs[0], *outputs))


def hidden_states(text: TextConfig, layer: int, dtype: DType) -> TensorSpec:
    """What passes from the stage that ends before `layer` to the one that begins with it."""
    shape = ("batch_size", "sequence_length", text.hidden_size)
    return TensorSpec(f"hidden_states.{layer}", dtype, shape, f"hidden_states.{layer}")


def vision_hidden_states(vision: VisionConfig, block: int, dtype: DType) -> TensorSpec:
    """The same between stages of a tower."""
    shape = ("num_patches", vision.hidden_size)
    return TensorSpec(f"vision_states.{block}", dtype, shape, f"vision_states.{block}")


def new_cache_shapes(text: TextConfig, limits: Limits, dtype: DType) -> list[TensorShape]:
    """Every `new.N.*` of `classic_text_interface` at its largest: a chunk, or one token a slot."""
    tokens = max(limits.max_prefill_chunk, limits.slots)
    shape = (tokens, text.num_key_value_heads, text.head_dim)
    return [
        (f"new.{layer}.{part}", dtype, shape)
        for layer in range(text.num_hidden_layers)
        for part in ("key", "value")
    ]


def io_shapes(
    model: ModelConfig, limits: Limits, dtype: DType, max_windows: int = 0
) -> list[TensorShape]:
    """Every tensor of the `io` pool, largest shape; `max_windows` as positions counts it."""
    text = model.text
    rope = (rope_rows(text, limits), text.head_dim // 2)
    shapes: list[TensorShape] = [
        *(
            (name, dtype, (limits.max_seq_len + limits.slots, text.hidden_size))
            for name in ("inputs_embeds", *(f"deepstack.{n}" for n in range(text.deepstack)))
        ),
        ("rope_cos", dtype, rope),
        ("rope_sin", dtype, rope),
        ("position_ids", "int64", (max(limits.max_prefill_chunk, limits.slots),)),
        ("write_indices", "int64", (limits.slots,)),
        ("logits", "float32", (limits.slots, text.vocab_size)),
    ]
    if model.vision is not None and model.image_processor is not None:
        patches = max_patches(model.image_processor)
        half = model.vision.head_dim // 2
        shapes += [
            ("pixel_values", dtype, (patches, model.vision.patch_dim)),
            ("vision_cos", dtype, (patches, half)),
            ("vision_sin", dtype, (patches, half)),
        ]
        if model.vision.num_position_embeddings is not None:
            shapes += [
                ("pos_embed_index", "int64", (patches, POSITION_TAPS)),
                ("pos_embed_weight", dtype, (patches, POSITION_TAPS)),
            ]
        if model.vision.window_size is not None:
            size = patches_per_window(model.vision)
            shapes += [
                ("window_index", "int64", (max_windows, size)),
                ("window_mask", "bool", (max_windows, size)),
                ("window_position", "int64", (patches,)),
            ]
    return shapes


def cache_shapes(text: TextConfig, limits: Limits, dtype: DType) -> list[TensorShape]:
    """Every tensor of the `kv_cache` pool."""
    shape = (limits.slots, text.num_key_value_heads, limits.max_seq_len, text.head_dim)
    return [
        (f"past_key_values.{layer}.{part}", dtype, shape)
        for layer in range(text.num_hidden_layers)
        for part in ("key", "value")
    ]
