"""Drawings of a plan: each format, and that they hold what they should."""

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from builders.limits import BuildOptions
from builders.plan_report import Report, report
from builders.plot import draw
from edgevlm.errors import BuildError

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module", params=[("qwen2-vl-7b", "orin-nano-8gb"), ("qwen2.5-7b", "4GiB")])
def found(request: pytest.FixtureRequest) -> Report:
    return report(*request.param, BuildOptions(slots=2))


@pytest.mark.parametrize("ending", [".svg", ".html"])
def test_svg_names_every_pool_and_stays_inside(found: Report, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plan{ending}"
    draw(found, path)
    text = path.read_text(encoding="utf-8")
    root = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    words = [node.text or "" for node in root.iter(f"{SVG}text")]
    for pool in found.planned.plan.pools:
        assert pool.reclaimable or pool.name in words
    assert any("this plan" in w for w in words) and any("budget" in w for w in words)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert -0.1 <= x and x + w <= width + 0.1 and -0.1 <= y and y + h <= height + 0.1


def test_colours_are_greys_and_neighbours_differ_by_more(found: Report, tmp_path: Path) -> None:
    draw(found, tmp_path / "plan.png")
    with Image.open(tmp_path / "plan.png") as picture:
        assert picture.mode == "L" and picture.width == 1920
        values = np.asarray(picture)
    assert values.min() < 50 and values.max() == 255
    assert 0.02 < (values < 128).mean() < 0.5


@pytest.mark.parametrize("name", ["plan", "plan.pdf", "plan.jpg"])
def test_other_endings_are_refused(found: Report, tmp_path: Path, name: str) -> None:
    with pytest.raises(BuildError, match=r"\.svg, \.png or \.html"):
        draw(found, tmp_path / name)


def test_a_place_that_cannot_be_written_is_a_clear_error(found: Report, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot be written"):
        draw(found, tmp_path / "nowhere" / "plan.svg")
