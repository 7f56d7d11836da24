"""Write the demo model in plain Hugging Face layout: tokenizer, configs, and bf16 weights."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from builders.demo.batches import MEAN, STD, SYSTEMS
from builders.demo.model import config
from builders.demo.scenes import ABOUTS, scene

CHECKPOINT = Path(__file__).parent / "checkpoint"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen2's split: words with the space before them, digits one by one.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _corpus() -> Iterator[str]:
    """Questions and answers without what is read letter by letter: no merge has two capitals."""
    rng = random.Random(7)
    for index in range(4000):
        for question in scene(rng, ABOUTS[index % len(ABOUTS)]).questions:
            yield question.text
            yield question.text[0].upper() + question.text[1:]
            if question.answer.islower() and question.kind != "word":
                yield question.answer
    for text in ("user\n", "assistant\n", "system\n", *SYSTEMS):
        yield from [text] * 1000


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE trained on the scenes' own sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def new_model(tokenizer: Tokenizer) -> Qwen2VLForConditionalGeneration:
    vocabulary = tokenizer.get_vocab()
    ids = {s: vocabulary[s] for s in SPECIAL}
    return Qwen2VLForConditionalGeneration(config(ids, tokenizer.get_vocab_size()))


def write(model: Qwen2VLForConditionalGeneration, tokenizer: Tokenizer, out: Path) -> None:
    """Write every file of the checkpoint but the card."""
    out.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
    )
    fast.chat_template = CHAT
    fast.save_pretrained(out)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings["chat_template"] = CHAT  # older readers look here, newer ones in the .jinja file
    _write_json(out / "tokenizer_config.json", settings)
    model.config.dtype = "bfloat16"
    model.config.architectures = ["Qwen2VLForConditionalGeneration"]
    model.config.save_pretrained(out)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    text = model.config.get_text_config()
    _write_json(
        out / "generation_config.json",
        dict(
            bos_token_id=text.bos_token_id,
            do_sample=False,
            eos_token_id=[text.eos_token_id, text.bos_token_id],
            pad_token_id=text.bos_token_id,
        ),
    )
    _write_json(
        out / "preprocessor_config.json",
        dict(
            image_processor_type="Qwen2VLImageProcessor",
            patch_size=14,
            temporal_patch_size=2,
            merge_size=2,
            min_pixels=56 * 56,
            max_pixels=28 * 28 * 64,
            do_resize=True,
            do_rescale=True,
            do_normalize=True,
            do_convert_rgb=True,
            rescale_factor=1 / 255,
            resample=3,
            image_mean=MEAN,
            image_std=STD,
        ),
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn a training state into a checkpoint.")
    parser.add_argument("--state", type=Path, help="state.pt of the trainer; none: random weights")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.state:
        state = torch.load(args.state, weights_only=True)
        tokenizer = Tokenizer.from_str(state["tokenizer"])
        model = new_model(tokenizer)
        model.load_state_dict(state["model"])
    else:
        tokenizer = make_tokenizer()
        model = new_model(tokenizer)
    write(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
