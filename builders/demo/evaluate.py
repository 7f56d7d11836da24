"""Measure the demo checkpoint in torch: exact-match accuracy by kind on fresh scenes.

Greedy decoding gives an answer exactly where every step's best token is the answer's next, so one
pass over question and answer measures it; --generate N checks N of them with plain transformers.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor

from builders.demo.batches import SYSTEMS, Batch, Encoder
from builders.demo.export import CHECKPOINT
from builders.demo.model import int4, quantised, text, tower
from builders.demo.scenes import ABOUTS, Example, Picture, Question, Scene, examples, scene

log = logging.getLogger(__name__)


def load(path: Path) -> Qwen2VLForConditionalGeneration:
    """The bf16 weights in an fp32 model."""
    model: Qwen2VLForConditionalGeneration = Qwen2VLForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32
    )
    return model.eval()


def right_answers(
    model: Qwen2VLForConditionalGeneration,
    encoder: Encoder,
    asked: Sequence[Example],
    head: torch.Tensor | None = None,
) -> list[bool]:
    """Which of the examples greedy decoding answers exactly; ``head`` replaces the tied one."""
    buckets: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for i, example in enumerate(asked):
        buckets[tuple(image.size for image in example.images)].append(i)
    right = [False] * len(asked)
    for members in buckets.values():
        for start in range(0, len(members), 32):
            part = members[start : start + 32]
            found = _batch(model, encoder, [asked[i] for i in part], head)
            for i, ok in zip(part, found, strict=True):
                right[i] = ok
    return right


def _batch(
    model: Qwen2VLForConditionalGeneration,
    encoder: Encoder,
    asked: Sequence[Example],
    head: torch.Tensor | None,
) -> list[bool]:
    samples = []
    for e in asked:
        pictures = tuple(Picture(image, "white", (), "") for image in e.images)
        samples.append((Scene("", pictures, ()), [Question(e.kind, e.question, e.answer)]))
    return _right(model, encoder, encoder.batch(samples), head)


@torch.no_grad()
def _right(
    model: Qwen2VLForConditionalGeneration,
    encoder: Encoder,
    batch: Batch,
    head: torch.Tensor | None,
) -> list[bool]:
    """Which of the batch's questions are answered exactly, given the right answers before."""
    sizes = [rows * columns for rows, columns in batch.grids]
    if len(set(sizes)) == 1:
        seen = tower(model.model.visual, batch.patches, batch.grids)
    else:  # the two pictures of a pair differ
        each = zip(torch.split(batch.patches, sizes), batch.grids, strict=True)
        seen = torch.cat([tower(model.model.visual, p, [grid]) for p, grid in each])
    embeds = model.model.language_model.embed_tokens(batch.ids)
    embeds = embeds.masked_scatter((batch.ids == encoder.pad)[..., None], seen)
    keep = batch.targets != -100
    logits = text(model, embeds, batch.positions, batch.mask, keep, head)
    good = (logits.argmax(-1) == batch.targets[keep]).float()
    ok = torch.ones(len(batch.kinds)).scatter_reduce(0, batch.owner[keep], good, "amin")
    return [bool(v) for v in ok]


def other_layouts(
    model: Qwen2VLForConditionalGeneration,
    encoder: Encoder,
    seed: int,
    count: int,
    head: torch.Tensor | None,
) -> dict[str, str]:
    """Right of asked, on ``count`` scenes each: up to three turns, text first, a system turn."""
    right: dict[str, list[bool]] = defaultdict(list)
    for name, layout, system in (
        ("turn", "turns", ""),
        ("text before the picture", "text first", ""),
        ("system turn", "shared", SYSTEMS[0]),
    ):
        rng = random.Random(seed)
        for index in range(count):
            drawn = scene(rng, ABOUTS[index % len(ABOUTS)])
            asked = rng.sample(drawn.questions, min(len(drawn.questions), 3))
            asked = asked if layout == "turns" else asked[:1]
            found = _right(model, encoder, encoder.batch([(drawn, asked)], layout, system), head)
            for turn, ok in enumerate(found, 1):
                right[f"turn {turn}" if layout == "turns" else name].append(ok)
    return {name: f"{sum(oks)} of {len(oks)}" for name, oks in right.items()}


def accuracy(asked: Sequence[Example], right: Sequence[bool]) -> dict[str, Any]:
    """Percent right in total and by kind, with the number of questions."""
    kinds: dict[str, list[bool]] = defaultdict(list)
    for example, ok in zip(asked, right, strict=True):
        kinds[example.kind].append(ok)
    return dict(
        questions=len(asked),
        total=round(100 * sum(right) / len(right), 2),
        by_kind={k: round(100 * sum(v) / len(v), 1) for k, v in kinds.items()},
        lowest=round(min(100 * sum(v) / len(v) for v in kinds.values()), 1),
    )


def round_weights(model: Qwen2VLForConditionalGeneration, group: int) -> torch.Tensor:
    """Round the linears in place and return the rounded head; the embedding stays as it is."""
    *linears, embedding = quantised(model)
    for weight in linears:
        weight.data = int4(weight.data, group)
    return int4(embedding.data, group)


def generated(path: Path, asked: Sequence[Example]) -> list[str]:
    """The answers of plain transformers: its image processor, its tokenizer, its generate."""
    model, tokenizer = load(path), AutoTokenizer.from_pretrained(path)
    processor = Qwen2VLImageProcessor.from_pretrained(path)
    pad = model.config.image_token_id
    answers = []
    for example in asked:
        pixels = processor(images=list(example.images), return_tensors="pt")
        parts: list[dict[str, str]] = [{"type": "image"} for _ in example.images]
        parts.append({"type": "text", "text": example.question})
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        head, *rest = prompt.split("<|image_pad|>")
        for grid, piece in zip(pixels["image_grid_thw"], rest, strict=True):
            head += "<|image_pad|>" * (int(grid.prod()) // 4) + piece
        ids = torch.tensor([tokenizer.encode(head, add_special_tokens=False)])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == pad).long(),
            max_new_tokens=48,
            **pixels,
        )
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--count", type=int, default=300, help="questions for each seed")
    parser.add_argument("--int4", type=int, default=0, metavar="GROUP", help="round the weights")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="check N of them")
    parser.add_argument("--layouts", type=int, default=0, metavar="N", help="chats about N scenes")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(1)  # small matrices: more threads only wait for each other
    model = load(args.checkpoint)
    encoder = Encoder(Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")))
    head = round_weights(model, args.int4) if args.int4 else None
    every: list[Example] = []
    ok: list[bool] = []
    report: dict[str, Any] = dict(weights=f"int4 group {args.int4}" if args.int4 else "fp32")
    for seed in args.seeds:
        asked = list(examples(seed, args.count))
        right = right_answers(model, encoder, asked, head)
        report[f"seed {seed}"] = accuracy(asked, right)
        every, ok = every + asked, ok + right
    report["all"] = accuracy(every, ok)
    if args.generate and not args.int4:
        answers = generated(args.checkpoint, every[: args.generate])
        same = [
            (answer == e.answer) == right
            for answer, e, right in zip(answers, every, ok, strict=False)
        ]
        report["generate agrees"] = f"{sum(same)} of {len(same)}"
    if args.layouts:
        report["layouts"] = other_layouts(model, encoder, args.seeds[0], args.layouts, head)
    log.info(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
