"""setup.py says what the code needs, and ships what the demo shows."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgevlm import __version__

ROOT = Path(__file__).resolve().parents[1]
CAPTURE = """
import json, runpy, setuptools
caught = {}
setuptools.setup = lambda **words: caught.update(words)
runpy.run_path("setup.py", run_name="__main__")
print(json.dumps(caught))
"""
DISTRIBUTION = {"PIL": "pillow", "tensorrt_rtx": "tensorrt-rtx-cu12"}
# Imported only by those who have a GPU, train the demo model, or convert an old tokenizer.
OPTIONAL = {
    "edgevlm/executors/cuda.py": {"cuda"},
    "builders/demo": {"torch", "transformers"},
    "builders/tokenizer_files.py": {"transformers"},
    "builders/compile_child.py": {"tensorrt", "tensorrt_rtx"},
    "builders/engine.py": {"tensorrt", "tensorrt_rtx"},
}


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    caught: dict[str, Any] = json.loads(done.stdout)
    return caught


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;\[ ]", r)[0].lower().replace("_", "-") for r in requirements}


def needed(folder: str) -> dict[str, set[str]]:
    """Distribution names that each file imports, by file."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        tops: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                tops |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                tops.add(node.module.partition(".")[0])
        tops -= set(sys.stdlib_module_names) | {"edgevlm", "builders"}
        relative = path.relative_to(ROOT).as_posix()
        for place, optional in OPTIONAL.items():
            if relative.startswith(place):
                tops -= optional
        found[relative] = {DISTRIBUTION.get(t, t).lower().replace("_", "-") for t in tops}
    return found


def test_the_runtime_needs_what_setup_says(metadata: dict[str, Any]) -> None:
    extras = metadata["extras_require"]
    installed = names([*metadata["install_requires"], *extras["host"], *extras["server"]])
    for path, wanted in needed("edgevlm").items():
        assert wanted <= installed, path
    every = set().union(*needed("edgevlm").values())
    assert names(metadata["install_requires"]) <= every, "nobody imports it any more"


def test_the_builders_need_what_setup_says(metadata: dict[str, Any]) -> None:
    extras = metadata["extras_require"]
    installed = names([*metadata["install_requires"], *extras["host"], *extras["build"]])
    for path, wanted in needed("builders").items():
        assert wanted <= installed, path


def test_dev_has_everything_but_torch(metadata: dict[str, Any]) -> None:
    extras = metadata["extras_require"]
    for extra in ("host", "build", "server", "rtx"):
        assert set(extras[extra]) <= set(extras["dev"])
    for requirements in (metadata["install_requires"], *extras.values()):
        assert "torch" not in names(requirements)


def test_requirements_have_lower_bounds_only(metadata: dict[str, Any]) -> None:
    for requirements in (metadata["install_requires"], *metadata["extras_require"].values()):
        for requirement in requirements:
            version = requirement.partition(";")[0]
            # cuda-bindings have an upper bound as well: they follow the driver's major version.
            pattern = r"cuda-bindings>=[0-9.]+,<[0-9]+|[A-Za-z0-9_.-]+>=[0-9.]+"
            assert re.fullmatch(pattern, version.strip()), requirement


def test_every_package_is_listed(metadata: dict[str, Any]) -> None:
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for house in ("edgevlm", "builders")
        for path in (ROOT / house).rglob("*.py")
    }
    assert set(metadata["packages"]) == folders


def test_package_data_is_there(metadata: dict[str, Any]) -> None:
    for package, globs in metadata["package_data"].items():
        folder = ROOT / Path(*package.split("."))
        for pattern in globs:
            assert list(folder.glob(pattern)), f"{folder / pattern} matches nothing"


def test_the_entry_point_exists(metadata: dict[str, Any]) -> None:
    (script,) = metadata["entry_points"]["console_scripts"]
    name, _, place = script.partition(" = ")
    module, _, function = place.partition(":")
    assert name == "edgevlm"
    assert callable(getattr(importlib.import_module(module), function))


def test_the_version_is_said_once(metadata: dict[str, Any]) -> None:
    assert metadata["version"] == __version__


def test_python_versions_agree(metadata: dict[str, Any]) -> None:
    assert metadata["python_requires"] == ">=3.10,<3.13"
    for minor in (10, 11, 12):
        assert f"Programming Language :: Python :: 3.{minor}" in metadata["classifiers"]


@pytest.mark.parametrize(
    ("pattern", "limit"), [("README.md", 150), ("docs/*.md", 100)], ids=["README", "docs"]
)
def test_pages_are_short_and_name_no_machine_of_ours(pattern: str, limit: int) -> None:
    pages = list(ROOT.glob(pattern))
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.count("\n") <= limit, page
        assert "/work/" not in text, page


def test_pages_link_to_files_that_exist() -> None:
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
