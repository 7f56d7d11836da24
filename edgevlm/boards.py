"""Jetson modules and JetPack releases, as data with sources. Nothing here was read on a board.

[S] a source was read, [K] general knowledge. SOURCES says where.
"""

import re
from dataclasses import dataclass
from typing import Literal

SOURCES = {
    "meta-tegra": "https://github.com/OE4T/meta-tegra docs/release-notes/JetPack-*.md, recipes",
    "jetpack": "https://developer.nvidia.com/embedded/jetpack-archive",
    "jetpack-7.2": "https://developer.nvidia.com/embedded/jetpack/downloads/archive-7.2",
    "roboflow": "https://github.com/roboflow/inference/pull/2531, read on a device",
    "nvmap": "Jetson Linux 36.5 release notes, fixed issue 5602402 (NvMap allocation policy)",
    "jetson-stats": "https://github.com/rbonghi/jetson_stats jtop/core/jetson_variables.py",
    "quick-start": "Jetson Linux quick start guide, list of modules and their part numbers",
    "modules": "https://developer.nvidia.com/embedded/jetson-modules",
}

# CUDA's compute capability by the system on chip: jetson-stats [S].
COMPUTE_CAPABILITY = {"tegra194": "7.2", "tegra234": "8.7", "tegra264": "11.0"}
CHIP_IDS = {"0x19": "tegra194", "0x23": "tegra234", "0x26": "tegra264"}  # [K], 0x23 [S]
# With it a single allocation of 3 GiB and more fails on 8 GB, whatever is free (nvmap) [S].
BAD_L4T = "36.4.7"
BAD_L4T_CHUNK = 1 << 30


@dataclass(frozen=True)
class Board:
    """A module by its part number. `device`: what `edgevlm plan --device` calls it."""

    part: str
    name: str
    memory_gb: int
    device: str
    source: str


BOARDS = (
    Board("p3767-0000", "Jetson Orin NX 16GB", 16, "orin-nx-16gb", "quick-start"),
    Board("p3767-0001", "Jetson Orin NX 8GB", 8, "orin-nx-8gb", "quick-start"),
    Board("p3767-0003", "Jetson Orin Nano 8GB", 8, "orin-nano-8gb", "quick-start"),
    Board("p3767-0004", "Jetson Orin Nano 4GB", 4, "orin-nano-4gb", "quick-start"),
    Board("p3767-0005", "Jetson Orin Nano 8GB (developer kit)", 8, "orin-nano-8gb", "quick-start"),
    Board("p3701-0000", "Jetson AGX Orin 32GB (developer kit)", 32, "agx-orin-32gb", "quick-start"),
    Board("p3701-0004", "Jetson AGX Orin 32GB", 32, "agx-orin-32gb", "quick-start"),
    Board("p3701-0005", "Jetson AGX Orin 64GB", 64, "agx-orin-64gb", "quick-start"),
    Board(
        "p3701-0008", "Jetson AGX Orin Industrial", 64, "agx-orin-industrial-64gb", "quick-start"
    ),
    Board("p3834-0008", "Jetson AGX Thor T5000", 128, "thor-t5000", "jetson-stats"),
)


@dataclass(frozen=True)
class JetPack:
    """A release. `lowering`: the best that its TensorRT takes; None: too old for edgevlm."""

    version: str
    l4t: str
    ubuntu: str
    python: str
    cuda: str
    tensorrt: str
    lowering: Literal["native", "classic"] | None
    boards: str
    source: str


_ORIN, _THOR = "Orin", "Thor"
JETPACKS = (
    JetPack("5.1.2", "35.4.1", "20.04", "3.8", "11.4", "8.5.2", None, "Xavier, Orin", "meta-tegra"),
    JetPack("5.1.6", "35.6.4", "20.04", "3.8", "11.4", "8.5.2", None, "Xavier, Orin", "meta-tegra"),
    JetPack("6.0", "36.3.0", "22.04", "3.10", "12.2", "8.6.2", None, _ORIN, "jetpack"),
    JetPack("6.1", "36.4.0", "22.04", "3.10", "12.6", "10.3.0.30", "classic", _ORIN, "meta-tegra"),
    JetPack("6.2", "36.4.3", "22.04", "3.10", "12.6", "10.3.0.30", "classic", _ORIN, "meta-tegra"),
    JetPack(
        "6.2.1", "36.4.4", "22.04", "3.10", "12.6", "10.3.0.30", "classic", _ORIN, "meta-tegra"
    ),
    JetPack("6.2.1", BAD_L4T, "22.04", "3.10", "12.6", "10.3.0.30", "classic", _ORIN, "nvmap"),
    JetPack(
        "6.2.2", "36.5.0", "22.04", "3.10", "12.6", "10.3.0.30", "classic", _ORIN, "meta-tegra"
    ),
    JetPack(
        "6.2.3", "36.5.2", "22.04", "3.10", "12.6", "10.3.0.30", "classic", _ORIN, "meta-tegra"
    ),
    JetPack("7.0", "38.2.0", "24.04", "3.12", "13.0", "10.13.3.9", "classic", _THOR, "meta-tegra"),
    JetPack("7.1", "38.4.0", "24.04", "3.12", "13.0", "10.13.3.9", "classic", _THOR, "meta-tegra"),
    JetPack(
        "7.2", "39.2.0", "24.04", "3.12", "13.2", "10.16.2.10", "native", "Orin, Thor", "roboflow"
    ),
    JetPack(
        "7.2.1", "39.2.1", "24.04", "3.12", "13.2", "10.16.2.10", "native", "Orin, Thor", "roboflow"
    ),
)


def find_board(compatible: tuple[str, ...], boot_control: str) -> Board | None:
    """By part number: carrier makers leave NVIDIA's words in `model`, or write their own."""
    parts = re.findall(r"\bp[0-9]{4}-[0-9]{4}", " ".join(compatible))
    # Docker hides the device tree; this file is mounted into containers.
    for number, sku in re.findall(r"^TNSPEC (\d{4})-\w*-(\d{4})-", boot_control, re.MULTILINE):
        parts.append(f"p{number}-{sku}")
    known = {board.part: board for board in BOARDS}
    return next((known[part] for part in parts if part in known), None)


def find_jetpack(l4t: str) -> JetPack | None:
    """The release of an L4T version, or the last of the same minor version that is known."""
    minor = l4t.split(".")[:2]
    near = None
    for release in JETPACKS:
        if release.l4t == l4t:
            return release
        if release.l4t.split(".")[:2] == minor:
            near = release
    return near


def version_numbers(version: str) -> tuple[int, ...]:
    """ "10.3.0.30-1+cuda12.5" as (10, 3, 0, 30): the numbers before anything else."""
    match = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9})*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def same_version(one: str, other: str) -> bool:
    """Whether two versions agree as far as the shorter one goes: 10.3.0 and 10.3.0.30 do."""
    a, b = version_numbers(one), version_numbers(other)
    length = min(len(a), len(b))
    return length > 0 and a[:length] == b[:length]
