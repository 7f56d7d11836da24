"""Which wheels a Jetson gets: every runtime dependency, resolved for aarch64 as pip does there.

    python3.10 scripts/check_wheels.py --python 3.10
    python3.12 scripts/check_wheels.py --python 3.12

Nothing is installed. Exit status 1 where a dependency has no wheel. pip evaluates environment
markers for the Python that runs it, so each is asked with its own; it needs setuptools.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# glibc 2.28 and older; JetPack 6 has 2.35, JetPack 7 has 2.39.
MANYLINUX = ("2014", "_2_17", "_2_24", "_2_26", "_2_27", "_2_28")
CAPTURE = """
import json, runpy, setuptools
caught = {}
setuptools.setup = lambda **words: caught.update(words)
runpy.run_path("setup.py", run_name="__main__")
print(json.dumps(caught))
"""


@dataclass(frozen=True)
class Case:
    """One way to install edgevlm on a board. `extra` "" is the runtime alone."""

    extra: str
    python: str


CASES = tuple(
    Case(extra, python)
    for extra in ("", "host", "jetson6", "jetson7")
    for python in ("3.10", "3.12")
)


def main() -> int:
    """Resolve every case and print one line per package."""
    parser = argparse.ArgumentParser(description="Which wheels a Jetson (aarch64) gets.")
    parser.add_argument("--timeout", type=int, default=300, help="seconds per pip run")
    parser.add_argument("--python", help="only this one: 3.10 or 3.12")
    args = parser.parse_args()
    cases = [case for case in CASES if args.python in (None, case.python)]
    requirements = read_requirements()
    with ThreadPoolExecutor(2) as pool:
        found = dict(
            zip(
                cases,
                pool.map(lambda case: resolve(requirements, case, args.timeout), cases),
                strict=True,
            )
        )
    print(table({case: wheels for case, wheels in found.items() if isinstance(wheels, dict)}))
    failed = [(case, why) for case, why in found.items() if isinstance(why, str)]
    for case, why in failed:
        print(f"error: [{case.extra}] for Python {case.python}: {why}", file=sys.stderr)
    return 1 if failed else 0


def read_requirements() -> dict[str, list[str]]:
    """Requirements by extra, as setup.py says them; "" is what every installation needs."""
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    words: dict[str, Any] = json.loads(done.stdout)
    return {"": words["install_requires"], **words["extras_require"]}


def pip_command(requirements: list[str], python: str, target: str) -> list[str]:
    """A dry run of pip as it would be on a board."""
    return [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
        *("--dry-run", "--ignore-installed", "--report", "-", "--target", target),
        *("--only-binary", ":all:", "--implementation", "cp", "--python-version", python),
        *(word for tag in MANYLINUX for word in ("--platform", f"manylinux{tag}_aarch64")),
        *requirements,
    ]


def resolve(requirements: dict[str, list[str]], case: Case, timeout: int) -> dict[str, str] | str:
    """Wheel file by package, with all that they need in turn; or why there is none."""
    wanted = list(dict.fromkeys(requirements[""] + requirements[case.extra]))
    with tempfile.TemporaryDirectory() as target:
        try:
            done = subprocess.run(
                pip_command(wanted, case.python, target),
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return f"pip took more than {timeout} s"
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        return errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {done.returncode}"
    return read_report(done.stdout)


def read_report(text: str) -> dict[str, str]:
    """Wheel file by package from pip's report. Where it lies is nobody's business."""
    return {
        entry["metadata"]["name"].lower(): entry["download_info"]["url"].rpartition("/")[2]
        for entry in json.loads(text)["install"]
    }


def describe(wheel: str) -> str:
    """ "numpy-2.2.6-cp310-cp310-manylinux_2_17_aarch64.manylinux2014_aarch64.whl" in short."""
    version, python, _, platform = wheel.removesuffix(".whl").replace("%2B", "+").rsplit("-", 3)
    short = platform.split(".")[0].replace("_aarch64", "")
    return f"{version.split('-')[1]} {python.split('.')[-1]} {short}"


def table(found: dict[Case, dict[str, str]]) -> str:
    """A Markdown table: package, who asks for it, and the wheel for each Python."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    base = {name for case, wheels in found.items() if not case.extra for name in wheels}
    for case, wheels in found.items():
        for name, wheel in wheels.items():
            extra = "" if name in base else case.extra
            rows.setdefault((extra, name), {})[case.python] = describe(wheel)
    pythons = sorted({case.python for case in found})
    heads = ["package", "for", *(f"Python {python}" for python in pythons)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (extra, name), wheels in sorted(rows.items()):
        cells = " | ".join(wheels.get(python, "not needed") for python in pythons)
        lines.append(f"| {name} | {f'[{extra}]' if extra else 'all'} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
