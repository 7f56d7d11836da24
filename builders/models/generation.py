"""generation_config.json and the stop set: the same for every family."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from builders.config_reader import ConfigReader
from edgevlm.config import GenerationDefaults

log = logging.getLogger(__name__)


def read_generation(
    generation: Mapping[str, Any], root: ConfigReader, tokenizer_eos: tuple[int, ...]
) -> GenerationDefaults:
    """Stop ids are the union of all that generation_config, config and tokenizer name, sorted."""
    reader = ConfigReader(generation, "generation_config.json")
    eos = {*reader.token_ids("eos_token_id"), *root.token_ids("eos_token_id"), *tokenizer_eos}
    if "text_config" in root:
        eos |= set(root.section("text_config").token_ids("eos_token_id"))
    if not eos:
        log.warning("the checkpoint names no end-of-text token: answers end at max_tokens only")
    return GenerationDefaults(
        eos_token_ids=tuple(sorted(eos)),
        temperature=reader.float("temperature", None),
        top_p=reader.float("top_p", None),
        top_k=reader.int("top_k", None, minimum=0),
        min_p=reader.float("min_p", None),
        repetition_penalty=reader.float("repetition_penalty", None),
        do_sample=reader.bool("do_sample", False),
    )
