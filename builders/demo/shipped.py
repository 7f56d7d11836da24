"""The pictures that ship with the demo, drawn from fixed seeds, and what to ask about them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from builders.demo.scenes import Scene, scene

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Shipped:
    """One scene to ship: the names of its files and the kinds of question to ask."""

    names: tuple[str, ...]
    seed: int
    about: str
    size: tuple[int, int] | None
    kinds: tuple[str, ...]

    def scene(self) -> Scene:
        return scene(random.Random(self.seed), self.about, self.size)


SHIPPED = (
    Shipped(("shapes.png",), 86, "shapes", (168, 112), ("caption", "where")),
    Shipped(("word.png",), 12, "word", (140, 84), ("word", "color")),
    Shipped(("number.png",), 13, "digits", (112, 112), ("digits", "count")),
    Shipped(("first.png", "second.png"), 14, "pair", None, ("two_pictures",)),
)


def questions() -> list[dict[str, object]]:
    """What pictures.json holds."""
    entries: list[dict[str, object]] = []
    for shipped in SHIPPED:
        drawn = shipped.scene()
        asked = [next(q for q in drawn.questions if q.kind == kind) for kind in shipped.kinds]
        names = shipped.names
        entries.append(
            {
                "image": names[0] if len(names) == 1 else list(names),
                "questions": [{"question": q.text, "answer": q.answer} for q in asked],
            }
        )
    return entries


def main() -> None:
    folder = HERE / "pictures"
    folder.mkdir(exist_ok=True)
    for shipped in SHIPPED:
        for name, image in zip(shipped.names, shipped.scene().images, strict=True):
            image.save(folder / name)
    text = json.dumps(questions(), indent=2) + "\n"
    (HERE / "pictures.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
