"""`edgevlm doctor`: what it says about each machine, and that it needs nothing to say it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgevlm import cli
from edgevlm.machine_checks import HEADLESS, NO_ZRAM, SWAP_FILE, UPGRADE_L4T

ROOT = Path(__file__).resolve().parents[2]
TREES = ROOT / "tests/trees"
NO_DESKTOP = "no desktop: it takes about 800 MiB of the memory that the GPU shares"
NO_ZRAM_WHY = "no zram: it lies in the same memory, and CUDA's pages cannot go there"
SWAP_WHY = "a file on NVMe, where other programs' pages can go while engines are compiled"
VENV = "-m venv --system-site-packages ~/edgevlm-venv"


def doctor(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    status = cli.main(["doctor", "--json", *map(str, words)])
    return status, json.loads(capsys.readouterr().out)


def unwell(document: dict[str, Any]) -> dict[str, tuple[str, str, str, str]]:
    return {
        check["name"]: (check["status"], check["found"], check["needed"], check["remedy"])
        for check in document["checks"]
        if check["status"] != "ok"
    }


EXPECTED = {
    "orin-nano-8gb-jp62": {
        "cuda-bindings": ("warn", "none", "12.x", "pip install 'edgevlm[jetson6]'"),
        "zram": ("warn", "3,810 MiB", NO_ZRAM_WHY, NO_ZRAM),
        "swap": ("warn", "none on disk", SWAP_WHY, SWAP_FILE),
        "desktop": ("warn", "running", NO_DESKTOP, HEADLESS),
        "power mode": (
            "warn",
            "25W, GPU at 305 of 918 MHz",
            "MAXN_SUPER, for full speed",
            "sudo nvpmodel -m 2 && sudo jetson_clocks",
        ),
    },
    "orin-nx-16gb-l4t-36.4.7": {
        "l4t": (
            "warn",
            "36.4.7 (JetPack 6.2.1)",
            "not 36.4.7: large CUDA allocations fail there, however much is free",
            UPGRADE_L4T,
        )
    },
    "agx-orin-64gb-jp72": {},
    "thor-t5000-jp72": {
        "tensorrt": (
            "warn",
            "10.16.2.10-1+cuda13.2, but not for this Python",
            "its Python module",
            f"sudo apt install python3-libnvinfer; /usr/bin/python3.12 {VENV}",
        ),
        "cuda-bindings": ("warn", "12.9.10", "13.x", "pip install 'edgevlm[jetson7]'"),
    },
    "desktop-rtx3060": {},
    "laptop-no-gpu": {},
}


@pytest.mark.parametrize("tree", EXPECTED)
def test_what_is_said_of_each_machine(tree: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = doctor(capsys, "--root", TREES / tree)
    assert (status, document["ok"]) == (0, True)
    assert unwell(document) == EXPECTED[tree]
    assert set(document) == {"ok", "checks", "machine"}
    for check in document["checks"]:
        assert set(check) == {"name", "status", "found", "needed", "remedy"}
        assert check["status"] == "ok" or (check["needed"] and check["remedy"])


def test_the_trees_are_those_that_are_tested() -> None:
    assert {path.name for path in TREES.iterdir() if path.is_dir()} == set(EXPECTED)


def test_found_where_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = doctor(capsys, "--root", TREES / "agx-orin-64gb-jp72")
    found = {check["name"]: check["found"] for check in document["checks"]}
    assert found == {
        "system": "Ubuntu 24.04.4 LTS, Linux 6.8.12-1021-tegra, aarch64, glibc 2.39",
        "python": "3.12",
        "board": "Jetson AGX Orin 64GB (p3701-0005)",
        "l4t": "39.2.0 (JetPack 7.2)",
        "gpu": "tegra234, integrated, compute capability 8.7, driver 595.78, "
        "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
        "tensorrt": "10.16.2.10-1+cuda13.2",
        "cuda-bindings": "13.4.4",
        "onnxruntime": "none; only bundles for the target host need it",
        "memory": "58,712 MiB available of 62,840 MiB, 52,841 MiB usable after a headroom of "
        "5,871 MiB",
        "cgroup limit": "none",
        "largest free block": "13350 x 4,096 KiB",
        "cma": "223 MiB free of 256 MiB",
        "zram": "none",
        "swap": "none on disk",
        "desktop": "not running",
        "power mode": "MAXN, GPU at 1,300 of 1,300 MHz, memory at 3,199 MHz",
    }
    machine = document["machine"]
    assert machine["board"]["device"] == "agx-orin-64gb"
    assert machine["jetpack"]["tensorrt"] == "10.16.2.10"
    assert machine["memory"]["available"] == 60120964 * 1024


def test_the_table_has_remedies_that_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--root", str(TREES / "orin-nano-8gb-jp62")]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"remedy: {SWAP_FILE}" in lines
    assert "desktop             warn  running" in lines


def changed(tmp_path: Path, tree: str, path: str, text: str) -> Path:
    root = tmp_path / tree
    shutil.copytree(TREES / tree, root, symlinks=True)
    (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("path", "text", "name", "found", "remedy"),
    [
        (
            "etc/nv_tegra_release",
            "# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref\n",
            "l4t",
            "35.4.1 (JetPack 5.1.2)",
            "flash JetPack 6.2.2 or 7.2.1",
        ),
        (
            "var/lib/dpkg/status",
            "Package: libc6\nStatus: install ok installed\nVersion: 2.27-3ubuntu1\n\n",
            "system",
            "Ubuntu 22.04.5 LTS, Linux 5.15.148-tegra, glibc 2.27",
            "install Ubuntu 22.04 or later",
        ),
    ],
)
def test_a_failure_is_printed_with_all_the_rest(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: str,
    text: str,
    name: str,
    found: str,
    remedy: str,
) -> None:
    root = changed(tmp_path, "orin-nano-8gb-jp62", path, text)
    status, document = doctor(capsys, "--root", root)
    assert (status, document["ok"]) == (1, False)
    assert unwell(document)[name][::3] == ("fail", remedy)
    assert unwell(document)[name][1] == found
    assert len(document["checks"]) == 16
    assert cli.main(["doctor", "--root", str(root)]) == 1
    out, err = capsys.readouterr()
    assert f"remedy: {remedy}" in out and "power mode" in out
    assert err == f"error: this will not work as it is: {name}\n"


@pytest.mark.parametrize(
    ("path", "text", "name", "found"),
    [
        ("etc/nv_tegra_release", "# R40 (release), REVISION: 1.0\n", "l4t",
         "40.1.0, which edgevlm does not know"),
        ("etc/nv_tegra_release", "# R38 (release), REVISION: 4.0\n", "l4t",
         "38.4.0 (JetPack 7.1)"),
        ("proc/meminfo", "MemTotal: 7802892 kB\nMemFree: 5000000 kB\n", "memory",
         "unknown: /proc/meminfo has no MemAvailable"),
        ("proc/meminfo", "MemTotal: 7802892 kB\nMemAvailable: 1024000 kB\n", "memory",
         "1,000 MiB available of 7,620 MiB, 400 MiB usable after a headroom of 600 MiB"),
        ("proc/buddyinfo", "Node 0, zone Normal 1 1 1 1 1 1 7 0 0 0 0 \n", "largest free block",
         "7 x 256 KiB: memory is fragmented"),
    ],
)  # fmt: skip
def test_other_warnings(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: str,
    text: str,
    name: str,
    found: str,
) -> None:
    root = changed(tmp_path, "orin-nano-8gb-jp62", path, text)
    status, document = doctor(capsys, "--root", root)
    assert (status, unwell(document)[name][:2]) == (0, ("warn", found))


def test_tensorrt_11_on_a_board(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = "Package: libnvinfer10\nStatus: install ok installed\nVersion: 11.4.0.106-1\n\n"
    root = changed(tmp_path, "agx-orin-64gb-jp72", "var/lib/dpkg/status", status)
    _, document = doctor(capsys, "--root", root)
    assert unwell(document)["tensorrt"] == (
        "warn",
        "11.4.0.106-1",
        "10.16.2.10, which JetPack 7.2 has; no TensorRT 11 supports JetPack",
        "pip uninstall tensorrt; sudo apt install tensorrt python3-libnvinfer",
    )


def test_an_empty_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = doctor(capsys, "--root", tmp_path)
    assert (status, document["ok"]) == (0, True)
    assert set(unwell(document)) == {"onnxruntime", "memory"}


def test_a_root_that_is_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--root", str(tmp_path / "nothing")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"error: {tmp_path / 'nothing'} is not a directory; give the root of a file system, with "
        "proc, sys and etc\n"
    )


def test_a_directory_that_is_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = doctor(capsys, tmp_path, "--root", TREES / "laptop-no-gpu")
    assert status == 1
    kind, found, needed, remedy = unwell(document)["bundle"]
    assert (kind, needed) == ("fail", "a whole bundle")
    assert found.startswith(f"{tmp_path} is not a bundle: it has no bundle.json")
    assert remedy == "give the directory that `edgevlm build` made"


def test_control_codes_in_a_file_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'PRETTY_NAME="\x1b[31mred\x07"\n'
    root = changed(tmp_path, "laptop-no-gpu", "etc/os-release", text)
    assert cli.main(["doctor", "--root", str(root)]) == 0
    assert "?[31mred?" in capsys.readouterr().out


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    return done.stdout


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "from edgevlm.cli import main\nimport sys\nmain(['doctor'])\n"
        "print('LOADED', *{m.partition('.')[0] for m in sys.modules})"
    )
    loaded = set(run(code).partition("LOADED")[2].split())
    assert not loaded & {"numpy", "rich", "PIL", "onnxruntime", "tensorrt", "cuda", "pynvml"}


def test_nvidia_smi_changes_nothing(tmp_path: Path) -> None:
    # sglang#3331: on a board it is missing, or prints [N/A]; here it must not even be started.
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\necho '[N/A]'\n")
    smi.chmod(0o755)
    tree = TREES / "orin-nano-8gb-jp62"
    code = f"from edgevlm.cli import main\nmain(['doctor', '--json', '--root', {str(tree)!r}])"
    with_smi = run(code, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert with_smi == run(code, PATH="/nonexistent")
    assert not (tmp_path / "started").exists()
