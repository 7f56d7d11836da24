"""Scenes as tensors: patches, token ids with 3-D positions and mask, and a label for every cell."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from builders.demo.scenes import (
    BACKGROUNDS,
    COLORS,
    LETTERS,
    SHAPES,
    SIZES,
    WORDS,
    Picture,
    Question,
    Scene,
    third,
)

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
CHARACTERS = "0123456789" + LETTERS
SYSTEMS = (
    "You are a helpful assistant.",
    "you answer questions about pictures.",
    "Answer in a few words.",
)
# What the tower is taught about every cell: number of classes, weight in the loss.
CELL_LABELS = {
    "what": (3, 1.0),
    "shape": (len(SHAPES), 1.0),
    "color": (len(COLORS), 1.0),
    "size": (2, 0.5),
    "character": (len(CHARACTERS), 1.0),
    "row": (3, 0.5),
    "column": (3, 0.5),
    "order": (6, 1.0),
    "last": (2, 0.5),
    "background": (3, 0.2),
}


def patches(image: Image.Image) -> np.ndarray:
    """A picture as the tower's input. -> [(H / 14) * (W / 14), 3 * 14 * 14], in merged order"""
    x = np.asarray(image, np.float32) / 255
    x = (x - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    rows, columns = x.shape[0] // 28, x.shape[1] // 28
    x = x.reshape(rows, 2, 14, columns, 2, 14, 3)
    return x.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns * 4, -1)


def cell_labels(picture: Picture) -> np.ndarray:
    """What is in each cell. -> [len(CELL_LABELS), rows * columns], -100 where nothing applies"""
    rows, columns = picture.rows, picture.columns
    out = np.full((len(CELL_LABELS), rows, columns), -100)
    at = {name: out[i] for i, name in enumerate(CELL_LABELS)}
    at["what"][:] = 0
    at["background"][:] = list(BACKGROUNDS).index(picture.background)
    at["row"][:] = np.array([third(r, rows) for r in range(rows)])[:, None]
    at["column"][:] = np.array([third(c, columns) for c in range(columns)])[None]
    for i, item in enumerate(picture.items):
        spot = (item.row, item.column)
        at["color"][spot] = list(COLORS).index(item.color)
        at["order"][spot] = i
        at["last"][spot] = i == len(picture.items) - 1
        if item.size:
            at["what"][spot] = 1
            at["shape"][spot] = SHAPES.index(item.what)
            at["size"][spot] = SIZES.index(item.size)
        else:
            at["what"][spot] = 2
            at["character"][spot] = CHARACTERS.index(item.what)
    return out.reshape(len(CELL_LABELS), -1)


@dataclass(frozen=True)
class Batch:
    """B samples of L tokens that ask Q questions about pictures of one size.

    ids        [B, L]
    positions  [3, B, L]
    mask       [B, 1, L, L]  added to the scores
    targets    [B, L]        the next token where an answer is due, else -100
    owner      [B, L]        which of the Q questions a target belongs to
    patches    [P, 588]
    labels     [len(CELL_LABELS), P / 4]
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor
    owner: torch.Tensor
    kinds: tuple[str, ...]
    patches: torch.Tensor
    grids: tuple[tuple[int, int], ...]
    labels: torch.Tensor


@dataclass
class _Tokens:
    """Tokens of one sample as they are laid down; segment 0 is seen by every later segment."""

    ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    answers: list[tuple[int, int, int]] = field(default_factory=list)  # start, end, question
    at: int = 0

    def text(self, ids: Sequence[int], segment: int = 0) -> None:
        self.ids += ids
        self.segments += [segment] * len(ids)
        self.positions += [(p, p, p) for p in range(self.at, self.at + len(ids))]
        self.at += len(ids)

    def picture(self, pad: int, rows: int, columns: int) -> None:
        at = self.at
        self.ids += [pad] * (rows * columns)
        self.segments += [0] * (rows * columns)
        self.positions += [(at, at + r, at + c) for r in range(rows) for c in range(columns)]
        self.at += max(rows, columns)


class Encoder:
    """Lays scenes out as chats, with the tokenizer's special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        (self.pad,) = tokenizer.encode("<|image_pad|>", add_special_tokens=False).ids
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self._known[text]

    def _pictures(self, t: _Tokens, pictures: Sequence[Picture]) -> None:
        for p in pictures:
            t.text(self.encode("<|vision_start|>"))
            t.picture(self.pad, p.rows, p.columns)
            t.text(self.encode("<|vision_end|>"))

    def _ask(self, t: _Tokens, question: Question, number: int, segment: int) -> None:
        t.text(self.encode("<|im_end|>\n<|im_start|>assistant\n"), segment)
        start = len(t.ids)
        t.text(self.encode(question.answer), segment)
        t.text(self.encode("<|im_end|>"), segment)
        t.answers.append((start, len(t.ids), number))

    def _lay(
        self,
        pictures: Sequence[Picture],
        questions: Sequence[Question],
        first: int,
        layout: str,
        system: str,
    ) -> _Tokens:
        t = _Tokens()
        if system:
            t.text(self.encode(f"<|im_start|>system\n{system}<|im_end|>\n"))
        t.text(self.encode("<|im_start|>user\n"))
        if layout == "text first":
            t.text(self.encode(questions[0].text))
            self._pictures(t, pictures)
            self._ask(t, questions[0], first, 0)
            return t
        self._pictures(t, pictures)
        base = t.at
        for i, question in enumerate(questions):
            segment = 0
            if layout == "turns" and i:
                t.text(self.encode("\n<|im_start|>user\n"))
            elif layout == "shared":  # every question stands right behind the picture
                segment, t.at = i + 1, base
            t.text(self.encode(question.text), segment)
            self._ask(t, question, first + i, segment)
        return t

    def batch(
        self,
        samples: Sequence[tuple[Scene, Sequence[Question]]],
        layout: str = "shared",
        system: str = "",
    ) -> Batch:
        """``layout``: questions side by side ("shared"), in "turns", or one with "text first"."""
        laid: list[_Tokens] = []
        kinds: list[str] = []
        for scene, asked in samples:
            questions = asked[:1] if layout == "text first" else asked
            laid.append(self._lay(scene.pictures, questions, len(kinds), layout, system))
            kinds += [q.kind for q in questions]
        b, n = len(laid), max(len(t.ids) for t in laid)
        ids, segments = np.zeros((b, n), np.int64), np.full((b, n), -1)
        positions = np.zeros((b, n, 3), np.int64)
        targets, owner = np.full((b, n), -100), np.zeros((b, n), np.int64)
        for i, t in enumerate(laid):
            m = len(t.ids)
            ids[i, :m], segments[i, :m], positions[i, :m] = t.ids, t.segments, t.positions
            for start, end, number in t.answers:
                targets[i, start - 1 : end - 1] = t.ids[start:end]
                owner[i, start - 1 : end - 1] = number
        s = torch.from_numpy(segments)
        seen = ((s[:, :, None] == s[:, None, :]) | (s[:, None, :] == 0)).tril()
        pictures = [p for scene, _ in samples for p in scene.pictures]
        return Batch(
            ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions).permute(2, 0, 1),
            mask=torch.zeros(b, 1, n, n).masked_fill_(~seen[:, None], -1e9),
            targets=torch.from_numpy(targets),
            owner=torch.from_numpy(owner),
            kinds=tuple(kinds),
            **pictures_as_tensors(pictures),
        )


def pictures_as_tensors(pictures: Sequence[Picture]) -> dict[str, Any]:
    """The fields of Batch that come from the pictures alone."""
    return dict(
        patches=torch.from_numpy(np.concatenate([patches(p.image) for p in pictures])),
        grids=tuple((p.rows * 2, p.columns * 2) for p in pictures),
        labels=torch.from_numpy(np.concatenate([cell_labels(p) for p in pictures], 1)),
    )


def any_word(rng: random.Random, room: int) -> str:
    """A word to read: every other one is random letters, so that reading is not guessing."""
    room = min(room, 6)
    if rng.random() < 0.5:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, room)))
    return rng.choice([w for w in WORDS if len(w) <= room])


def reworded(rng: random.Random, question: Question) -> Question:
    """The question as a person may type it: a capital first, or no mark at the end."""
    text = question.text
    if rng.random() < 0.2:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.15:
        text = text.rstrip("?.")
    return Question(question.kind, text, question.answer)


def choose(
    rng: random.Random, questions: Sequence[Question], count: int, weights: dict[str, float]
) -> list[Question]:
    """``count`` different questions, kinds weighted."""
    left = list(questions)
    chosen: list[Question] = []
    while left and len(chosen) < count:
        # A kind that has several questions in a scene counts once.
        share = {k: sum(q.kind == k for q in left) for k in {q.kind for q in left}}
        w = [weights.get(q.kind, 1.0) / share[q.kind] for q in left]
        i = rng.choices(range(len(left)), w)[0]
        chosen.append(reworded(rng, left.pop(i)))
    return chosen
