"""The Dockerfiles cannot be built where the tests run: they are read."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from edgevlm.boards import JETPACKS
from tests.test_scripts import tool

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
every = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, continuation lines joined."""
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    text = "\n".join(lines).replace("\\\n", " ")
    found = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        word, _, rest = line.partition(" ")
        found.append((word, rest.strip()))
    return found


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert [path.name for path in FILES] == [
        "host.Dockerfile",
        "jetpack6.Dockerfile",
        "jetpack7.Dockerfile",
    ]


@every
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = subprocess.run(
        [tool("hadolint"), "--no-color", str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@every
def test_layers_are_pinned_and_leave_nothing_behind(path: Path) -> None:
    found = instructions(path)
    assert [word for word, _ in found].count("FROM") == 1
    for word, rest in found:
        assert word != "ADD"
        if word == "FROM":
            assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", rest), "a tag with a version"
        if word == "RUN" and "apt-get" in rest:
            assert rest.index("apt-get update") < rest.index("apt-get install")
            assert rest.count("apt-get install") == rest.count("--no-install-recommends")
            assert "rm -rf /var/lib/apt/lists/*" in rest
        if word == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest
            assert "rm -rf /src" in rest


@every
def test_it_ends_as_an_ordinary_user_who_runs_edgevlm(path: Path) -> None:
    found = dict(instructions(path))  # the last of each
    assert found["USER"] == "1000"
    assert "useradd --create-home --uid 1000" in found["RUN"]
    assert found["ENTRYPOINT"] == '["edgevlm"]'
    assert found["CMD"] == '["doctor"]'
    if path.name != "host.Dockerfile":  # the GPU's devices belong to that group
        assert "--groups video" in found["RUN"]


def test_jetpack_images_hold_what_boards_py_says() -> None:
    text6, text7 = (
        (ROOT / f"docker/jetpack{number}.Dockerfile").read_text(encoding="utf-8")
        for number in (6, 7)
    )
    six = next(release for release in JETPACKS if release.version == "6.1")
    seven = next(release for release in JETPACKS if release.version == "7.2")
    assert f":r{six.l4t}\n" in text6
    assert f"ARG TENSORRT={seven.tensorrt}-1+cuda{seven.cuda}\n" in text7
    assert f"ARG L4T=r{seven.l4t.removesuffix('.0')}\n" in text7
    assert f"FROM ubuntu:{seven.ubuntu}\n" in text7
    for text, release, extra in ((text6, six, "jetson6"), (text7, seven, "jetson7")):
        assert f"/usr/bin/python{release.python} -m venv --system-site-packages" in text
        assert f"'/src[{extra}]'" in text


def test_the_context_holds_what_is_installed_and_nothing_else() -> None:
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*"
    kept = {line[1:] for line in rules if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    read = set(re.findall(r'HERE / "([^"/]+)', (ROOT / "setup.py").read_text(encoding="utf-8")))
    packages = {"edgevlm", "builders"}
    assert read | packages | {"setup.py", "pyproject.toml"} <= kept
    assert not kept & {"tests", "docs", "benchmarks", ".git"}
    for path in FILES:
        assert shlex.split(dict(instructions(path))["COPY"]) == [".", "/src"]
