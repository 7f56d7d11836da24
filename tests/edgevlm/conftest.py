"""A small byte-level tokenizer with Qwen's control tokens, chat templates, and a config."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from edgevlm.config import (
    GenerationDefaults,
    ImageProcessorConfig,
    ImageTokens,
    ModelConfig,
    RopeConfig,
    TextConfig,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
NOT_SPECIAL = ("<|image_pad|>", "<tool_call>", "</think>")
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN2_VL = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}" + IMAGE + "{% elif "
    "'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIM = (
    "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'tool' %}{% continue %}"
    "{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
THINK = (
    "{% for m in messages %}{% set text = m.content %}{% if '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% generation %}{{ text }}{% endgeneration %}<|im_end|>\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with Qwen's pre-tokenizer; its image token is not marked special."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator([Path(textwrap.__file__).read_text()], trainer)
    inner.add_special_tokens(list(SPECIAL))
    inner.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in NOT_SPECIAL])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return path


@pytest.fixture(scope="session")
def model_config(tokenizer_file: Path) -> ModelConfig:
    """A Qwen2-VL-like model's config, as far as host work looks at it."""
    inner = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    start, end, image = (
        inner.token_to_id(t) for t in ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
    )
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return ModelConfig(
        "qwen2_vl",
        TextConfig(
            "qwen2_vl", 640, 64, 2, 4, 2, 16, 128, 1e-6,
            RopeConfig(1e6, "mrope", (2, 3, 3)), True, True, 32768,
        ),
        GenerationDefaults((inner.token_to_id("<|im_end|>"),)),
        image_processor=ImageProcessorConfig(
            "smart_resize", 14, 2, 2, 56 * 56, 28 * 28 * 1280, mean, std
        ),
        image_tokens=ImageTokens(image, start, end),
    )  # fmt: skip


@pytest.fixture(scope="session")
def text_config(model_config: ModelConfig) -> ModelConfig:
    """The same without eyes: a text model."""
    text = replace(model_config.text, rope=RopeConfig(1e6))
    return replace(model_config, text=text, image_processor=None, image_tokens=None)


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Chat templates by name."""
    return {"qwen2_vl": QWEN2_VL, "smol": SMOL, "trim": TRIM, "think": THINK}
