"""Scenes of the demo model: small pictures drawn with Pillow, with questions and their answers.

Everything sits on the 28-pixel grid of the model's visual tokens, one shape or character a cell.
The same seed gives the same scenes on any machine: Python's generator and Pillow's own font.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont

CELL = 28
SIDES = (84, 112, 140, 168)
COLORS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 225),
    "yellow": (245, 215, 30),
    "purple": (150, 40, 180),
    "orange": (250, 135, 20),
}
BACKGROUNDS = {"white": (248, 248, 248), "black": (12, 12, 12), "gray": (140, 140, 140)}
FRAMES = {"white": (70, 70, 70), "black": (190, 190, 190), "gray": (20, 20, 20)}
SHAPES = ("circle", "square", "triangle", "star", "cross")
SIZES = ("small", "large")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WORDS = tuple(
    "CAT DOG SUN MAP BOX KEY CUP PEN HAT BUS CAR SKY TEA ICE OWL FOX BEE ANT EGG JAM YES RED "
    "STOP EXIT OPEN SHOP TAXI MILK FISH BIRD MOON SNOW GOLD PARK BOOK TIME HOME QUIZ JUMP WAVE "
    "APPLE BREAD CHAIR DANCE EARTH GHOST HELLO JUICE LEMON MUSIC NORTH OCEAN PIANO QUEEN RIVER "
    "TIGER UNCLE VOICE WATER ZEBRA".split()
)
ABOUTS = ("shapes", "digits", "word", "pair")
KINDS = (
    "shape",
    "color",
    "size",
    "where",
    "count",
    "count_of",
    "yes_no",
    "digits",
    "word",
    "caption",
    "two_pictures",
)
# Answers that must come equally often, or guessing the most frequent one would look like knowing.
_TURNS = {"yes_no": ("yes", "no"), "count_of": ("1", "2", "0")}
_ABOUT_OF_KIND = {"digits": "digits", "word": "word", "two_pictures": "pair"}


@dataclass(frozen=True)
class Item:
    """One shape or one character in one cell; ``size`` is empty for a character."""

    what: str
    color: str
    size: str
    row: int
    column: int


@dataclass(frozen=True)
class Picture:
    """A drawn picture with the truth about it; ``items`` in reading order."""

    image: Image.Image
    background: str
    items: tuple[Item, ...]
    text: str

    @property
    def rows(self) -> int:
        return self.image.height // CELL

    @property
    def columns(self) -> int:
        return self.image.width // CELL


@dataclass(frozen=True)
class Question:
    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class Scene:
    """One or two pictures and every question that can be asked about them."""

    about: str
    pictures: tuple[Picture, ...]
    questions: tuple[Question, ...]

    @property
    def images(self) -> tuple[Image.Image, ...]:
        return tuple(p.image for p in self.pictures)


@dataclass(frozen=True)
class Example:
    images: tuple[Image.Image, ...]
    kind: str
    question: str
    answer: str


def third(index: int, count: int) -> int:
    """The third (0, 1, 2) that holds the middle of cell ``index`` of ``count``."""
    return min(2, int(3 * (index + 0.5) / count))


def place(item: Item, rows: int, columns: int) -> str:
    """Where an item is, as the model says it: "top left", "middle center", ..."""
    return f"{ROWS[third(item.row, rows)]} {COLUMNS[third(item.column, columns)]}"


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=25)


def _shade(rng: random.Random, color: tuple[int, int, int], spread: int) -> tuple[int, int, int]:
    r, g, b = (max(0, min(255, v + rng.randint(-spread, spread))) for v in color)
    return r, g, b


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, x: int, y: int, r: float, fill: tuple[int, int, int]
) -> None:
    if shape == "circle":
        draw.ellipse([x - r, y - r, x + r, y + r], fill=fill)
    elif shape == "square":
        s = r * 0.88
        draw.rectangle([x - s, y - s, x + s, y + s], fill=fill)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x - r, y + r * 0.8), (x + r, y + r * 0.8)], fill=fill)
    elif shape == "cross":
        t = r * 0.36
        draw.rectangle([x - r, y - t, x + r, y + t], fill=fill)
        draw.rectangle([x - t, y - r, x + t, y + r], fill=fill)
    else:
        points = []
        for i in range(10):
            angle = -math.pi / 2 + i * math.pi / 5
            q = r * (1.1 if i % 2 == 0 else 0.45)
            points.append((x + q * math.cos(angle), y + q * math.sin(angle)))
        draw.polygon(points, fill=fill)


def _draw(
    rng: random.Random, width: int, height: int, items: Sequence[Item], text: str = ""
) -> Picture:
    background = rng.choice(tuple(BACKGROUNDS))
    image = Image.new("RGB", (width, height), _shade(rng, BACKGROUNDS[background], 6))
    draw = ImageDraw.Draw(image)
    # The frame is what lets the vision tower know where in the picture a cell is.
    draw.rectangle([0, 0, width - 1, height - 1], outline=FRAMES[background], width=1)
    shade = {c: _shade(rng, rgb, 10) for c, rgb in COLORS.items()}
    shift_x, shift_y = rng.randint(-1, 1), rng.randint(-1, 1)
    for item in items:
        x, y = CELL * item.column + CELL // 2, CELL * item.row + CELL // 2
        if not item.size:  # the characters of a word move together
            draw.text(
                (x + shift_x, y + shift_y + 9),
                item.what,
                font=_font(),
                fill=shade[item.color],
                stroke_width=1,
                anchor="ms",
            )
        elif item.size == "large":
            _draw_shape(draw, item.what, x, y, rng.uniform(11, 12.5), shade[item.color])
        else:
            x, y = x + rng.randint(-2, 2), y + rng.randint(-2, 2)
            _draw_shape(draw, item.what, x, y, rng.uniform(6, 7), shade[item.color])
    ordered = tuple(sorted(items, key=lambda i: (i.row, i.column)))
    return Picture(image, background, ordered, text)


def shapes_picture(rng: random.Random, width: int, height: int, count: int = 0) -> Picture:
    """A picture of ``count`` shapes (0: one to four), no two alike in both shape and colour."""
    count = count or rng.choices((1, 2, 3, 4), (20, 30, 30, 20))[0]
    cells = [(r, c) for r in range(height // CELL) for c in range(width // CELL)]
    looks = [(s, c) for s in SHAPES for c in COLORS]
    items = [
        Item(shape, color, rng.choice(SIZES), row, column)
        for (shape, color), (row, column) in zip(
            rng.sample(looks, count), rng.sample(cells, count), strict=True
        )
    ]
    return _draw(rng, width, height, items)


def text_picture(rng: random.Random, width: int, height: int, text: str) -> Picture:
    """A picture of one row of characters, one a cell, in one colour."""
    row = rng.randrange(height // CELL)
    first = rng.randint(0, width // CELL - len(text))
    color = rng.choice(tuple(COLORS))
    items = [Item(char, color, "", row, first + i) for i, char in enumerate(text)]
    return _draw(rng, width, height, items, text)


def _pick(rng: random.Random, *templates: str) -> str:
    return rng.choice(templates)


def _a(color: str, shape: str) -> str:
    return f"{'an' if color == 'orange' else 'a'} {color} {shape}"


def _caption(picture: Picture) -> str:
    if picture.text:
        return f"the {'number' if picture.text.isdigit() else 'word'} {picture.text}"
    return ", ".join(f"a {i.size} {i.color} {i.what}" for i in picture.items)


def _caption_question(rng: random.Random, picture: Picture) -> Question:
    text = _pick(rng, "describe the picture.", "what is in the picture?", "describe the image.")
    return Question("caption", text, _caption(picture))


def _background_question(rng: random.Random, picture: Picture) -> Question:
    hue = _pick(rng, "color", "colour")
    return Question("color", f"what {hue} is the background?", picture.background)


def _count_question(rng: random.Random, picture: Picture) -> Question:
    count = 0 if picture.text else len(picture.items)
    text = _pick(rng, "how many shapes are there?", "how many shapes are in the picture?")
    return Question("count", text, str(count))


def _text_questions(rng: random.Random, picture: Picture) -> list[Question]:
    kind, noun = ("digits", "number") if picture.text.isdigit() else ("word", "word")
    read = _pick(rng, f"what {noun} is shown?", f"read the {noun}.", "what does it say?")
    hue = _pick(rng, "color", "colour")
    return [
        Question(kind, read, picture.text),
        Question("color", f"what {hue} is the {noun}?", picture.items[0].color),
        _background_question(rng, picture),
        _count_question(rng, picture),
        _caption_question(rng, picture),
    ]


def _count_of_questions(rng: random.Random, items: Sequence[Item]) -> list[Question]:
    shape = rng.choice(items).what if rng.random() < 0.6 else rng.choice(SHAPES)
    color = rng.choice(items).color if rng.random() < 0.6 else rng.choice(tuple(COLORS))
    plural = shape + ("es" if shape == "cross" else "s")
    return [
        Question(
            "count_of",
            f"how many {plural} are there?",
            str(sum(i.what == shape for i in items)),
        ),
        Question(
            "count_of",
            f"how many {color} shapes are there?",
            str(sum(i.color == color for i in items)),
        ),
    ]


def _yes_no_questions(rng: random.Random, items: Sequence[Item]) -> list[Question]:
    """One that is answered yes and one no; a no shares shape or colour with what is there."""
    there = {(i.what, i.color) for i in items}
    yes = rng.choice(items)
    near = rng.choice(items)
    missing = [(near.what, c) for c in COLORS] + [(s, near.color) for s in SHAPES]
    no = rng.choice([look for look in missing if look not in there])
    questions = []
    for (shape, color), answer in (((yes.what, yes.color), "yes"), (no, "no")):
        alone = [i for i in items if i.what == shape]
        texts = [f"is there {_a(color, shape)}?", f"do you see {_a(color, shape)}?"]
        if len(alone) == 1:
            texts.append(f"is the {shape} {color}?")
        questions.append(Question("yes_no", rng.choice(texts), answer))
    return questions


def _shape_questions(rng: random.Random, picture: Picture) -> list[Question]:
    items, hue = picture.items, _pick(rng, "color", "colour")
    questions = [
        _background_question(rng, picture),
        _count_question(rng, picture),
        _caption_question(rng, picture),
        *_count_of_questions(rng, items),
        *_yes_no_questions(rng, items),
    ]
    for item in items:
        only_shape = sum(i.what == item.what for i in items) == 1
        only_color = sum(i.color == item.color for i in items) == 1
        name = f"the {item.color} {item.what}"
        if only_shape:
            questions.append(Question("color", f"what {hue} is the {item.what}?", item.color))
            name = _pick(rng, name, f"the {item.what}")
        if only_color:
            text = _pick(rng, f"what shape is {item.color}?", f"which shape is {item.color}?")
            questions.append(Question("shape", text, item.what))
        text = _pick(rng, f"is {name} small or large?", f"what size is {name}?")
        questions.append(Question("size", text, item.size))
        questions.append(
            Question("where", f"where is {name}?", place(item, picture.rows, picture.columns))
        )
    return questions


def _pair_questions(rng: random.Random, pictures: Sequence[Picture]) -> list[Question]:
    """Which of two pictures has what only one of them has."""
    questions = []
    for here, other, answer in ((0, 1, "first"), (1, 0, "second")):
        looks = {(i.what, i.color) for i in pictures[other].items}
        shapes = {i.what for i in pictures[other].items}
        for item in pictures[here].items:
            names = []
            if (item.what, item.color) not in looks:
                names.append(_a(item.color, item.what))
            if item.what not in shapes:
                names.append(f"a {item.what}")
            if names:
                verb = _pick(rng, "has", "shows")
                text = f"which picture {verb} {rng.choice(names)}?"
                questions.append(Question("two_pictures", text, answer))
    return questions


def scene(
    rng: random.Random,
    about: str = "",
    size: tuple[int, int] | None = None,
    words: Callable[[random.Random, int], str] | None = None,
) -> Scene:
    """Draw one scene; what is not given is drawn by lot.

    ``about`` is one of ABOUTS, ``size`` the width and height of the (first) picture, and ``words``
    gives a word of at most so many letters in place of one from WORDS.
    """
    about = about or rng.choice(ABOUTS)
    width, height = size or (rng.choice(SIDES), rng.choice(SIDES))
    if about == "shapes":
        picture = shapes_picture(rng, width, height)
        return Scene(about, (picture,), tuple(_shape_questions(rng, picture)))
    if about == "pair":
        side = size or (rng.choice(SIDES[:2]), rng.choice(SIDES[:2]))
        second = size or (rng.choice(SIDES[:2]), rng.choice(SIDES[:2]))
        pictures = tuple(shapes_picture(rng, *s, count=rng.randint(1, 2)) for s in (side, second))
        questions = _pair_questions(rng, pictures)
        if not questions:  # both pictures show the same looks
            return scene(rng, about, size, words)
        return Scene(about, pictures, tuple(questions))
    room = width // CELL
    if about == "digits":
        text = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, min(4, room))))
    elif words:
        text = words(rng, room)
    else:
        text = rng.choice([w for w in WORDS if len(w) <= room])
    picture = text_picture(rng, width, height, text)
    return Scene(about, (picture,), tuple(_text_questions(rng, picture)))


def _about_for(rng: random.Random, kind: str) -> str:
    if kind in _ABOUT_OF_KIND:
        return _ABOUT_OF_KIND[kind]
    if kind in ("color", "count", "caption") and rng.random() < 0.2:
        return rng.choice(("digits", "word"))
    return "shapes"


def examples(seed: int, n: int) -> Iterator[Example]:
    """``n`` questions, each about a fresh scene: the kinds in turn, and the answers in _TURNS."""
    rng = random.Random(seed)
    for index in range(n):
        kind, turn = KINDS[index % len(KINDS)], index // len(KINDS)
        wanted = _TURNS.get(kind)
        fits: list[Question] = []
        while not fits:
            drawn = scene(rng, _about_for(rng, kind))
            fits = [
                q
                for q in drawn.questions
                if q.kind == kind and (not wanted or q.answer == wanted[turn % len(wanted)])
            ]
        question = rng.choice(fits)
        yield Example(drawn.images, kind, question.text, question.answer)
