"""Tiny random checkpoints in every layout, their bundles, and transformers as the oracle."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from builders.build import BuildOptions, build
from edgevlm.bundle import TOKENIZER, Bundle
from edgevlm.chat_template import ChatTemplate
from edgevlm.executors.host import HostExecutor
from edgevlm.preprocess import resize_image
from edgevlm.prompt import Messages, Prompt, PromptBuilder
from edgevlm.runner import ModelRunner
from edgevlm.tokenizer import Tokenizer

torch.set_num_threads(1)  # its threads spin at each other's barriers where cores are shared

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    + IMAGE
    + "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGE_TOKEN, TOKENS = 260, 261  # ids above are padding of the vocabulary, and never chosen
MIN_PIXELS, MAX_PIXELS = 56 * 56, 112 * 112
LIMITS = {"max_seq_len": 512, "max_prefill_chunk": 64, "slots": 3}
TEXT = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 257,
    "bos_token_id": None,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
MROPE_INTERLEAVED = MROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 80, "num_heads": 4, "mlp_ratio": 2, "hidden_size": 64},
    "qwen2_5_vl": {
        "depth": 4,
        "hidden_size": 80,
        "num_heads": 4,
        "intermediate_size": 100,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
    },
    "qwen3_vl": {
        "depth": 4,
        "hidden_size": 80,
        "num_heads": 4,
        "intermediate_size": 100,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0, 2],
        "num_position_embeddings": 36,
    },
}
PATCH_SIZES = {"qwen3_vl": 16}  # 14 in the others
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": MIN_PIXELS,
    "max_pixels": MAX_PIXELS,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


@dataclass(frozen=True)
class Kind:
    """One way that a checkpoint can come. `publish` gives transformers' files another layout."""

    model_type: str
    tied: bool
    hub: bool = False  # flat config, tensors under model. and visual.
    rope: dict[str, Any] | None = None
    text: dict[str, Any] = field(default_factory=dict)  # over TEXT
    publish: Callable[[Path], None] | None = None


def publish_internlm2(path: Path) -> None:
    """A llama checkpoint as InternLM2's are: other names, and q, k and v fused by group."""
    config = json.loads((path / "config.json").read_text())
    config |= {
        "model_type": "internlm2",
        "architectures": ["InternLM2ForCausalLM"],
        "bias": False,
        "rope_theta": config.pop("rope_parameters")["rope_theta"],
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    for key in ("attention_bias", "mlp_bias", "head_dim"):
        config.pop(key)
    (path / "config.json").write_text(json.dumps(config))
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    names = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    tensors = load_file(path / "model.safetensors")
    renamed = {}
    for name, value in tensors.items():
        if "self_attn.q_proj" in name:
            hidden = value.shape[1]
            q = value.reshape(groups, heads // groups, -1, hidden)
            k, v = (
                tensors[name.replace("q_proj", other)].reshape(groups, 1, -1, hidden)
                for other in ("k_proj", "v_proj")
            )
            fused = torch.cat([q, k, v], dim=1).reshape(-1, hidden).contiguous()
            renamed[name.replace("self_attn.q_proj", "attention.wqkv")] = fused
        elif "k_proj" not in name and "v_proj" not in name:
            for theirs, published in names.items():
                name = name.replace(theirs, published)
            renamed[name] = value
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})


KINDS = {
    "qwen2": Kind("qwen2", tied=False),
    "qwen2-tied": Kind("qwen2", tied=True),
    "llama": Kind("llama", tied=False),
    "llama3-tied": Kind("llama", tied=True, rope=LLAMA3),
    "qwen3-tied": Kind("qwen3", tied=True, text={"head_dim": 32}),
    "internlm2": Kind("llama", tied=False, publish=publish_internlm2),
    "qwen2_vl": Kind("qwen2_vl", tied=False),
    "qwen2_vl-hub-tied": Kind("qwen2_vl", tied=True, hub=True),
    "qwen2_5_vl-tied": Kind("qwen2_5_vl", tied=True),
    "qwen2_5_vl-hub": Kind("qwen2_5_vl", tied=False, hub=True),
    "qwen3_vl": Kind("qwen3_vl", tied=False, text={"head_dim": 32}),
}
VISION_KINDS = [name for name, kind in KINDS.items() if kind.model_type in TOWERS]


@dataclass(frozen=True)
class Tiny:
    """A transformers model, and the bundle of the checkpoint it was saved to."""

    kind: Kind
    model: Any
    bundle: Bundle
    checkpoint: Path

    def all_logits(
        self, ids: NDArray[np.int64], pictures: Sequence[Image.Image] = ()
    ) -> NDArray[np.float32]:
        """transformers' logits of every position [n, vocab]."""
        with torch.no_grad():
            return np.asarray(self.model(**self.inputs(ids, pictures)).logits[0].numpy())

    def next_tokens(
        self, ids: NDArray[np.int64], answer: Sequence[int], pictures: Sequence[Image.Image] = ()
    ) -> list[int]:
        """transformers' greedy choice after the prompt and after every token of `answer`.

        It equals `answer` exactly where generating greedily from the prompt gives `answer`.
        """
        row = np.concatenate([ids, np.array(answer, np.int64)])
        choices = self.all_logits(row, pictures)[:, :TOKENS].argmax(axis=1)
        return [int(token) for token in choices[len(ids) - 1 : -1]]

    def inputs(self, ids: NDArray[np.int64], pictures: Sequence[Image.Image]) -> dict[str, Any]:
        """What transformers' forward takes for these ids and pictures."""
        rows = torch.from_numpy(ids)[None]
        given: dict[str, Any] = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        if self.kind.model_type in TOWERS:
            given["mm_token_type_ids"] = (rows == self.model.config.image_token_id).int()
        if pictures:
            given |= self.pixels(pictures)
        return given

    def pixels(self, pictures: Sequence[Image.Image]) -> dict[str, Any]:
        """pixel_values and image_grid_thw by transformers' Pillow processor."""
        return pixels(pictures, preprocessor(self.kind))


def preprocessor(kind: Kind) -> dict[str, Any]:
    """preprocessor_config.json."""
    return PREPROCESSOR | {"patch_size": PATCH_SIZES.get(kind.model_type, 14)}


def pixels(pictures: Sequence[Image.Image], config: dict[str, Any]) -> dict[str, Any]:
    """pixel_values and image_grid_thw by transformers' Pillow processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    settings = {k: v for k, v in config.items() if k != "image_processor_type"}
    processor = Qwen2VLImageProcessorPil(**settings)
    return dict(processor(images=list(pictures), return_tensors="pt"))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise: no two patches are alike."""
    rng = np.random.default_rng([width, height, seed])
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def random_model(kind: Kind, seed: int = 7, **changes: Any) -> Any:
    """A transformers model whose softmaxes are not flat, as they would be with 0.02."""
    torch.manual_seed(seed)
    settings = TEXT | {"tie_word_embeddings": kind.tied} | kind.text | changes
    if kind.rope is not None:
        settings["rope_parameters"] = kind.rope
    if kind.model_type in TOWERS:
        settings |= {"rope_parameters": MROPE}
        if kind.model_type == "qwen3_vl":
            settings |= {"rope_parameters": MROPE_INTERLEAVED}
        config = transformers.AutoConfig.for_model(
            kind.model_type,
            text_config=settings,
            vision_config=TOWERS[kind.model_type],
            vision_start_token_id=258,
            vision_end_token_id=259,
            image_token_id=IMAGE_TOKEN,
            tie_word_embeddings=kind.tied,
        )
        model = transformers.AutoModelForImageTextToText.from_config(config)
    else:
        config = transformers.AutoConfig.for_model(kind.model_type, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * (0.3 if value.ndim == 1 else 0.15))
            if "norm" in name and name.endswith("weight") or "ln_q.weight" in name:
                value.add_(1.0)
            if "lm_head" in name or "embed_tokens" in name:
                value[IMAGE_TOKEN] = 0.0  # never the likeliest: no answer asks for a picture
    return model


def save_checkpoint(model: Any, kind: Kind, path: Path) -> None:
    """Write all the files that a checkpoint has."""
    model.save_pretrained(path)
    tokenizer(path / "tokenizer.json")
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    if kind.model_type in TOWERS:
        (path / "preprocessor_config.json").write_text(json.dumps(preprocessor(kind)))
    if kind.hub:
        _to_hub_layout(path)
    if kind.publish is not None:
        kind.publish(path)


def _to_hub_layout(path: Path) -> None:
    """As the hub's files are: flat config, old rope keys, no `language_model` in names."""
    config = json.loads((path / "config.json").read_text())
    text, vision = config.pop("text_config"), config.pop("vision_config")
    rope = text.pop("rope_parameters")
    for key in ("model_type", "dtype", "layer_types"):
        text.pop(key, None)
    config |= text | {
        "model_type": config["model_type"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "use_sliding_window": False,
        "vision_config": {k: v for k, v in vision.items() if k not in ("dtype", "model_type")},
    }
    (path / "config.json").write_text(json.dumps(config))
    for file in path.glob("*.safetensors"):
        tensors = {}
        for name, value in load_file(file).items():
            short = name.replace("model.language_model.", "model.")
            tensors[short.replace("model.visual.", "visual.")] = value
        save_file(tensors, file, metadata={"format": "pt"})


def tokenizer(path: Path) -> None:
    """One token per byte, then the control tokens: ids 256 to 260."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    inner.save(str(path))


class TinyModels:
    """Makes each kind once a session, when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._made: dict[tuple[Any, ...], Tiny] = {}

    def get(self, name: str, weights: Any = "fp32", **options: int) -> Tiny:
        key = (name, weights, *sorted(options.items()))
        if key not in self._made:
            self._made[key] = self._make(name, weights, options)
        return self._made[key]

    def _make(self, name: str, weights: Any, options: dict[str, int]) -> Tiny:
        kind = KINDS[name]
        model = random_model(kind)
        checkpoint = self.directory / name
        if not checkpoint.is_dir():
            save_checkpoint(model, kind, checkpoint)
        out = self.directory / f"{name}-bundle-{len(self._made)}"
        # No reference: it costs a process, and transformers is the better oracle.
        settings = {"reference": False} | LIMITS | options
        bundle = build(checkpoint, out, BuildOptions(weights=weights, **settings))
        return Tiny(kind, model, bundle, checkpoint)


def make_prompt(tiny: Tiny, text: str | Messages, pictures: Sequence[Image.Image] = ()) -> Prompt:
    """What VLM makes of a question or of messages."""
    inner = Tokenizer.from_file(tiny.bundle.file(TOKENIZER))
    builder = PromptBuilder(tiny.bundle.manifest.model, inner, ChatTemplate(TEMPLATE, {}))
    return builder.build(text, list(pictures))


@contextlib.contextmanager
def running(tiny: Tiny) -> Iterator[ModelRunner]:
    """A runner on the host executor."""
    executor = HostExecutor(tiny.bundle, threads=1)
    try:
        yield ModelRunner(tiny.bundle, executor)
    finally:
        executor.close()


def prefill(
    runner: ModelRunner,
    slot: int,
    prompt: Prompt,
    pictures: Sequence[Image.Image] = (),
    start: int = 0,
) -> NDArray[np.float32]:
    """Pictures and prompt into a slot; the last logits [vocab]."""
    rows = np.zeros(len(prompt.ids), np.bool_)
    processor = runner.model.image_processor
    for run, grid in zip(prompt.image_runs, prompt.grids, strict=True):
        rows[run.start : run.start + run.length] = True
        if run.start >= start:
            assert processor is not None
            runner.encode_image(resize_image(pictures[run.image], processor), grid, run.start)
    keys = prompt.keys([bytes([i] * 8) for i in range(len(pictures))])
    into = runner.slots[slot]
    return runner.prefill(into, prompt.ids, keys, prompt.positions, start, rows).copy()


def assert_close(found: NDArray[Any], expected: NDArray[Any], cosine: float = 0.99999) -> None:
    """Every row points the same way, and no value is far off."""
    for row, wanted in zip(np.atleast_2d(found), np.atleast_2d(expected), strict=True):
        row, wanted = row.astype(np.float64), wanted.astype(np.float64)
        similarity = row @ wanted / (np.linalg.norm(row) * np.linalg.norm(wanted))
        assert similarity >= cosine, f"cosine {similarity}"
    worst = np.abs(found - expected).max() / np.abs(expected).max()
    assert worst <= 10 * np.sqrt(1 - cosine), f"off by {worst} of the largest value"
