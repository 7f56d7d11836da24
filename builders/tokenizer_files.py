"""The tokenizer's files of a checkpoint: tokenizer.json, the chat template, the eos ids.

A checkpoint without tokenizer.json is converted by transformers, imported only then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builders.shards import AGAIN, read_json
from edgevlm.errors import UnsupportedCheckpoint

SLOW_FILES = ("vocab.json", "tokenizer.model", "vocab.txt", "spiece.model")


@dataclass(frozen=True)
class TokenizerFiles:
    """`tokenizer_json` is the file's text; `chat_template` is None where there is none."""

    tokenizer_json: str
    config: Mapping[str, Any]
    chat_template: str | None
    eos_token_ids: tuple[int, ...]


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Everything of the tokenizer that a bundle keeps."""
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    path = directory / "tokenizer.json"
    if path.is_file():
        tokenizer = read_json(path)
        text = path.read_text(encoding="utf-8-sig")
    else:
        text = _convert(directory)
        tokenizer = json.loads(text)
    if not isinstance(tokenizer.get("model"), dict):
        raise UnsupportedCheckpoint(f"{path} has no tokenizer model; {AGAIN}")
    return TokenizerFiles(text, config, _chat_template(directory, config), _eos(tokenizer, config))


def _convert(directory: Path) -> str:
    """The fast form of an older tokenizer, by transformers."""
    if not any((directory / name).is_file() for name in SLOW_FILES):
        raise UnsupportedCheckpoint(
            f"{directory} has no tokenizer.json and no older tokenizer either; "
            "download the checkpoint's tokenizer files"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UnsupportedCheckpoint(
            f"{directory} has no tokenizer.json, and converting its older tokenizer needs "
            "transformers, which is not installed; pip install transformers"
        ) from None
    try:
        fast = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, use_fast=True)
        return str(fast.backend_tokenizer.to_str())
    except Exception as error:  # whatever transformers raises, the file is what the reader can fix
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedCheckpoint(
            f"{directory} has no tokenizer.json, and transformers cannot convert its older "
            f"tokenizer ({first}); provide tokenizer.json"
        ) from error


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins, then chat_template.json, then tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    path = directory / "chat_template.json"
    found = config.get("chat_template")
    where = "tokenizer_config.json"
    if path.is_file():
        found, where = read_json(path).get("chat_template"), path.name
    if isinstance(found, list):  # several, named: [{"name": "default", "template": "..."}, ...]
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, Mapping)}
        if "default" not in named:
            raise UnsupportedCheckpoint(
                f"{where} has the chat templates {sorted(map(str, named))} and none named default; "
                "name one of them default"
            )
        found = named["default"]
    if found is not None and not isinstance(found, str):
        raise UnsupportedCheckpoint(
            f"{where} has a chat_template of type {type(found).__name__}, not text; {AGAIN}"
        )
    return found


def _eos(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """The id of tokenizer_config's eos_token; none where it names none or one without an id."""
    token = config.get("eos_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(token, str):
        return ()
    for added in tokenizer.get("added_tokens") or ():
        if added.get("content") == token:
            return (int(added["id"]),)
    vocab = tokenizer["model"].get("vocab")
    found = vocab.get(token) if isinstance(vocab, Mapping) else None
    return (found,) if isinstance(found, int) else ()
