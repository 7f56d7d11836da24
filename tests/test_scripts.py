"""Lint of what is no Python, and the script that asks which wheels a board gets."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHELL = sorted((ROOT / "jetson").glob("*.sh"))
UNITS = sorted((ROOT / "jetson").glob("*.service"))


def tool(name: str) -> str:
    """A program of the environment that runs the tests, or of the machine; skips without."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shell_scripts_are_clean(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert script.stat().st_mode & 0o111 == 0o111
    done = subprocess.run(
        [tool("shellcheck"), "--severity=style", str(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_are_clean(unit: Path, tmp_path: Path) -> None:
    """systemd's own check, over a program that is there in place of ours."""
    text, count = re.subn(
        "(?m)^ExecStart=/[^ ]+", "ExecStart=/bin/true", unit.read_text(encoding="utf-8")
    )
    assert count == 1
    copy = tmp_path / unit.name
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", str(copy)],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    # It warns with status 0, and speaks of this machine's other units as well.
    assert not [line for line in done.stderr.splitlines() if unit.name in line]
    if done.returncode != 0:
        pytest.skip(f"systemd-analyze cannot work here: {done.stderr.strip()}")


@pytest.fixture
def check_wheels() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("check_wheels", ROOT / "scripts/check_wheels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_wheels"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["check_wheels"]


def test_check_wheels_knows_every_requirement_of_a_board(check_wheels: ModuleType) -> None:
    requirements = check_wheels.read_requirements()
    assert {case.extra for case in check_wheels.CASES} == {"", "host", "jetson6", "jetson7"}
    for extra in ("", "host", "jetson6", "jetson7"):
        assert requirements[extra]
        # On a board TensorRT is JetPack's, never pip's.
        assert not [word for word in requirements[extra] if "tensorrt" in word]
    assert requirements["jetson6"] == ["cuda-bindings>=12.8,<13"]
    assert requirements["jetson7"] == ["cuda-bindings>=13,<14"]


def test_check_wheels_reads_a_report_and_hides_where_from(check_wheels: ModuleType) -> None:
    wheel = "numpy-2.2.6-cp310-cp310-manylinux_2_17_aarch64.manylinux2014_aarch64.whl"
    report = {
        "install": [
            {
                "metadata": {"name": "NumPy", "version": "2.2.6"},
                "download_info": {"url": f"https://somewhere.example/x/{wheel}"},
            }
        ]
    }
    found = check_wheels.read_report(json.dumps(report))
    assert found == {"numpy": wheel}
    assert check_wheels.describe(wheel) == "2.2.6 cp310 manylinux_2_17"
    case = check_wheels.Case
    table = check_wheels.table(
        {
            case("", "3.10"): found,
            case("", "3.12"): found,
            case("host", "3.10"): {**found, "x": "x-1-py3-none-any.whl"},
        }
    )
    assert table.startswith("| package | for | Python 3.10 | Python 3.12 |\n|---|---|---|---|\n")
    assert "| x | [host] | 1 py3 any | not needed |" in table
    assert "example" not in table


def test_check_wheels_asks_as_a_board_would(check_wheels: ModuleType) -> None:
    words = check_wheels.pip_command(["numpy>=1.26"], "3.10", "nowhere")
    assert {"--dry-run", "--only-binary", "manylinux2014_aarch64", "manylinux_2_28_aarch64"} <= set(
        words
    )
    assert not [word for word in words if "://" in word]
