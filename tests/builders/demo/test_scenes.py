"""The demo's scenes: drawn the same from the same seed, and the answers agree with the drawing."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from builders.demo import scenes, shipped
from builders.demo.scenes import KINDS, Example, Picture, Question, Scene, examples, scene

DEMO = Path(shipped.__file__).parent
COUNT = 20 * len(KINDS)


@pytest.fixture(scope="module")
def drawn() -> list[Example]:
    return list(examples(3, COUNT))


def some_scenes(about: str, count: int = 60) -> Iterator[Scene]:
    rng = random.Random(7)
    for _ in range(count):
        yield scene(rng, about)


def seen(example: Example) -> tuple[list[bytes], str, str, str]:
    pixels = [image.tobytes() for image in example.images]
    return pixels, example.kind, example.question, example.answer


def test_the_same_seed_gives_the_same_scenes(drawn: list[Example]) -> None:
    again = examples(3, COUNT)
    assert all(seen(a) == seen(b) for a, b in zip(drawn, again, strict=True))


def test_another_seed_gives_other_scenes(drawn: list[Example]) -> None:
    other = examples(4, COUNT)
    same = sum(seen(a)[0] == seen(b)[0] for a, b in zip(drawn, other, strict=True))
    assert same < COUNT / 20


def test_a_longer_stream_begins_with_the_shorter(drawn: list[Example]) -> None:
    assert [seen(e) for e in examples(3, 5)] == [seen(e) for e in drawn[:5]]


def test_every_kind_comes_equally_often(drawn: list[Example]) -> None:
    assert Counter(e.kind for e in drawn) == dict.fromkeys(KINDS, COUNT // len(KINDS))


def test_yes_and_no_come_equally_often(drawn: list[Example]) -> None:
    answers = Counter(e.answer for e in drawn if e.kind == "yes_no")
    assert answers["yes"] == answers["no"] == COUNT // len(KINDS) // 2


def test_no_kind_has_one_answer_only(drawn: list[Example]) -> None:
    for kind in KINDS:
        answers = Counter(e.answer for e in drawn if e.kind == kind)
        assert answers.most_common(1)[0][1] <= 0.7 * answers.total(), answers


def test_sides_are_whole_cells_and_not_only_square(drawn: list[Example]) -> None:
    sizes = {image.size for e in drawn for image in e.images}
    assert all(side in scenes.SIDES for size in sizes for side in size)
    assert all(side % scenes.CELL == 0 for side in scenes.SIDES)
    assert len(sizes) > 8
    assert any(width != height for width, height in sizes)


def test_only_pairs_have_two_pictures(drawn: list[Example]) -> None:
    for e in drawn:
        assert len(e.images) == (2 if e.kind == "two_pictures" else 1)


def named(picture: Picture, text: str) -> list[scenes.Item]:
    """The items that the words of a question can mean."""
    words = text.rstrip("?.").split()
    colors = [w for w in words if w in scenes.COLORS]
    shapes = [s for s in scenes.SHAPES if s in words or s + "s" in words or s + "es" in words]
    return [
        i
        for i in picture.items
        if (not colors or i.color in colors) and (not shapes or i.what in shapes)
    ]


def truth(picture: Picture, question: Question) -> str:
    """The answer, worked out from the items alone."""
    items = named(picture, question.text)
    if question.kind == "count_of":
        return str(len(items))
    if question.kind == "yes_no":
        return "yes" if items else "no"
    if question.kind == "count":
        return str(len(picture.items))
    if question.kind == "caption":
        return ", ".join(f"a {i.size} {i.color} {i.what}" for i in picture.items)
    if "background" in question.text:
        return picture.background
    (item,) = items
    if question.kind == "where":
        across = item.column + 0.5, picture.columns
        down = item.row + 0.5, picture.rows
        return " ".join(
            names[int(3 * at / of)]
            for names, (at, of) in ((scenes.ROWS, down), (scenes.COLUMNS, across))
        )
    return {"color": item.color, "shape": item.what, "size": item.size}[question.kind]


def test_answers_about_shapes_are_what_was_drawn() -> None:
    kinds = set()
    for s in some_scenes("shapes"):
        for question in s.questions:
            assert question.answer == truth(s.pictures[0], question), question
            kinds.add(question.kind)
    assert kinds == set(KINDS) - {"digits", "word", "two_pictures"}


@pytest.mark.parametrize("about", ["digits", "word"])
def test_answers_about_text_are_what_was_drawn(about: str) -> None:
    for s in some_scenes(about):
        (picture,) = s.pictures
        items = picture.items
        assert "".join(i.what for i in items) == picture.text
        assert [i.column for i in items] == [items[0].column + n for n in range(len(items))]
        answers = {q.kind: q.answer for q in s.questions}
        assert answers[about] == picture.text
        assert answers["count"] == "0"
        assert answers["caption"].endswith(picture.text)
        assert picture.text.isdigit() if about == "digits" else picture.text in scenes.WORDS


def test_what_is_asked_of_two_pictures_is_in_one_of_them() -> None:
    for s in some_scenes("pair"):
        assert s.questions
        for question in s.questions:
            here = [bool(named(picture, question.text)) for picture in s.pictures]
            assert here == [question.answer == "first", question.answer == "second"], question


def test_items_are_where_the_truth_says() -> None:
    for s in some_scenes("shapes", 30):
        (picture,) = s.pictures
        for item in picture.items:
            x, y = (scenes.CELL * i + scenes.CELL // 2 for i in (item.column, item.row))
            pixel = picture.image.getpixel((x, y))
            assert isinstance(pixel, tuple)
            color = scenes.COLORS[item.color]
            assert all(abs(a - b) <= 10 for a, b in zip(pixel, color, strict=True)), item


def test_words_can_be_given() -> None:
    found = scene(random.Random(1), "word", (112, 84), lambda rng, room: "QX"[:room])
    assert found.pictures[0].text == "QX"
    assert found.images[0].size == (112, 84)


def test_shipped_questions_are_what_the_scenes_say() -> None:
    text = (DEMO / "pictures.json").read_text(encoding="utf-8")
    assert json.loads(text) == shipped.questions()


def test_shipped_pictures_are_what_the_scenes_draw() -> None:
    names = set()
    for entry in shipped.SHIPPED:
        for name, image in zip(entry.names, entry.scene().images, strict=True):
            with Image.open(DEMO / "pictures" / name) as file:
                # Another FreeType may shade the edges of a character otherwise.
                assert file.size == image.size
                assert file.getpixel((5, 5)) == image.getpixel((5, 5))
            names.add(name)
    assert names == {path.name for path in (DEMO / "pictures").iterdir()}
