"""A Hugging Face checkpoint directory: its config, tokenizer files and weights.

All that can be wrong with the files is refused here, before any work; only the values are read
later, tensor by tensor. Names come out canonical (see weights.py), values as float32.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders.models import Family, family_of
from builders.shards import AGAIN, READABLE, Entry, open_shards, read_float32, read_json, same_bytes
from builders.stored import Stored
from builders.tokenizer_files import read_tokenizer_files
from edgevlm.config import ModelConfig
from edgevlm.errors import UnsupportedCheckpoint

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Longest first. The hub's qwen2_vl files need none of these; transformers 5 writes the first two.
PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.output.", "output."),
    ("model.lm_head.", "lm_head."),
    ("model.visual.", "visual."),
)
# buffers that older writers saved; they are computed from the config
COMPUTED = re.compile(r"\.rotary_(pos_)?emb\.inv_freq$")


def canonical_name(name: str) -> str:
    """A tensor's name as the hub's Qwen2-VL files have it, whoever wrote the file."""
    for prefix, replacement in PREFIXES:
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    return name


class Checkpoint:
    """A checkpoint directory, opened and checked; it is a `WeightSource`.

    `config` is the model's, `bytes` the size of the tensors it needs as they are stored, `extra`
    the names of tensors in the files that the family has no use for.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        raw = _read_config(self.path)
        self.family: Family = family_of(raw)
        _refuse_quantised(raw)
        tokenizer = read_tokenizer_files(self.path)
        self.tokenizer_json: str = tokenizer.tokenizer_json
        self.tokenizer_config: Mapping[str, Any] = tokenizer.config
        self.chat_template: str | None = tokenizer.chat_template
        self.config: ModelConfig = self.family.read_config(
            raw,
            _optional_json(self.path / "generation_config.json") or {},
            _preprocessor(self.path),
            tokenizer.eos_token_ids,
        )
        entries = _by_family(_canonical(open_shards(self.path)), self.family.stored(self.config))
        self.config = _settle_head(self.config, entries)
        self._shapes = self.family.tensor_shapes(self.config)
        self._stored = self.family.stored(self.config)
        _check_tensors(self._shapes, entries, self.config, self._stored)
        self.extra: tuple[str, ...] = _extra_tensors(self._shapes, entries)
        self._entries = {name: entries[name] for name in self._shapes}
        self.bytes: int = sum(entry.nbytes for entry in set(self._entries.values()))

    def names(self) -> Collection[str]:
        """Canonical names of all the tensors that the family needs."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it."""
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """How it is stored: BF16, F16 or F32."""
        return self._entries[name].dtype

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Its values, read now and owned by the caller; a value that is not finite is refused."""
        values = read_float32(self._entries[name], name)
        return self._stored[name].take(values) if name in self._stored else values

    def rows(self, name: str, begin: int, end: int) -> NDArray[np.float32]:
        """Rows `begin` to `end` of it, as `tensor` reads them."""
        stored = self._stored.get(name)
        if stored is None or stored.rows is None:
            return read_float32(self._entries[name], name, begin, end)
        wanted = stored.rows[begin:end]  # in runs that others lie between: read over them
        first = int(wanted.min())
        band = read_float32(self._entries[name], name, first, int(wanted.max()) + 1)
        return band[wanted - first]


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UnsupportedCheckpoint(f"{path} does not exist; give a checkpoint's directory")
    if not path.is_dir():
        raise UnsupportedCheckpoint(
            f"{path} is a file; give the checkpoint's directory, which has config.json in it"
        )
    if not (path / "config.json").is_file():
        found = "is empty" if not any(path.iterdir()) else "has no config.json"
        raise UnsupportedCheckpoint(f"{path} {found}; give a Hugging Face checkpoint's directory")
    return read_json(path / "config.json")


def _optional_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _preprocessor(path: Path) -> dict[str, Any] | None:
    """preprocessor_config.json, or transformers 5's processor_config.json where it has images."""
    own = _optional_json(path / "preprocessor_config.json")
    if own is not None:
        return own
    processor = _optional_json(path / "processor_config.json") or {}
    return processor if processor.get("image_processor") else None


def _refuse_quantised(raw: Mapping[str, Any]) -> None:
    text = raw.get("text_config")
    for config in (raw, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if found := config.get(key):
                method = found.get("quant_method") if isinstance(found, Mapping) else None
                raise UnsupportedCheckpoint(
                    f"config.json has {key}: the weights are quantised already "
                    f"({method or 'by an unnamed method'}), and only bf16, fp16 and fp32 are read; "
                    "use the checkpoint it was made from"
                )


def _canonical(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    named: dict[str, Entry] = {}
    origin: dict[str, str] = {}
    for name, entry in entries.items():
        to = canonical_name(name)
        if to in named:
            raise UnsupportedCheckpoint(
                f"the weights hold both {origin[to]!r} and {name!r}, which are one tensor to us; "
                "remove one of them"
            )
        named[to], origin[to] = entry, name
    return named


def _by_family(entries: dict[str, Entry], stored: Mapping[str, Stored]) -> dict[str, Entry]:
    """Entries under canonical names, where a family's files have names of their own."""
    named = {name: entries[at.name] for name, at in stored.items() if at.name in entries}
    theirs = {at.name for at in stored.values()}
    return {name: entry for name, entry in entries.items() if name not in theirs} | named


def _settle_head(config: ModelConfig, entries: Mapping[str, Entry]) -> ModelConfig:
    """A tied model that brings a different head keeps its own head, as in transformers 5."""
    head, embedding = entries.get(HEAD), entries.get(EMBEDDING)
    if not config.text.tie_word_embeddings or head is None or embedding is None:
        return config
    if head.shape != embedding.shape or same_bytes(head, embedding):
        return config  # a wrong shape of the unused head is reported as extra
    log.warning(
        "config.json says tie_word_embeddings, but lm_head.weight differs from the embedding: "
        "the head in the file is used"
    )
    text = dataclasses.replace(config.text, tie_word_embeddings=False)
    return dataclasses.replace(config, text=text)


def _check_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, Entry],
    config: ModelConfig,
    stored: Mapping[str, Stored],
) -> None:
    """Each tensor the family needs is there, in its shape, in a dtype that is read."""
    places = {name: stored.get(name) or Stored(name, shape) for name, shape in shapes.items()}
    missing = list(dict.fromkeys(at.name for name, at in places.items() if name not in entries))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        why = "the download is incomplete or the config is of another model"
        if missing == [HEAD]:
            why = "config.json says tie_word_embeddings false; set it to true if the head is tied"
        raise UnsupportedCheckpoint(
            f"the weights have no {missing[0]!r}{more}, which {config.model_type} needs; {why}"
        )
    for canonical, at in places.items():
        entry, name = entries[canonical], at.name
        if entry.shape != at.shape:
            raise UnsupportedCheckpoint(
                f"{name!r} has shape {list(entry.shape)}, and config.json makes it "
                f"{list(at.shape)}; weights and config are of different models, {AGAIN}"
            )
        if entry.dtype not in READABLE:
            raise UnsupportedCheckpoint(
                f"{name!r} is stored as {entry.dtype}, and only {', '.join(READABLE)} are read; "
                "use the checkpoint it was made from"
            )


def _extra_tensors(
    shapes: Mapping[str, tuple[int, ...]], entries: Mapping[str, Entry]
) -> tuple[str, ...]:
    """Reported where they belong to something else, refused where they belong to this model."""
    extra = sorted(name for name in entries if name not in shapes)
    for name in extra:
        ours = name.startswith(("model.", "visual.", "lm_head.")) and name != HEAD
        if ours and not COMPUTED.search(name):
            raise UnsupportedCheckpoint(
                f"the weights hold {name!r}, which the config does not account for; without it the "
                "model would answer differently, use the config.json that came with the weights"
            )
    if extra:
        log.info("%d tensors are not used, the first is %s", len(extra), extra[0])
    return tuple(extra)
