"""What a model can be planned for: memory, bandwidth and arithmetic of each device, with sources.

Facts end in [S] where a source was read, in [K] where they are general knowledge or arithmetic
from it, in [U] where only users report them. Nothing was measured on a board.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builders.targets import TARGETS, ExecutorName, Target, board_target
from edgevlm.commands.arguments import byte_size
from edgevlm.errors import BuildError
from edgevlm.filesystem import FileSystem
from edgevlm.meminfo import headroom, read_memory

MIB = 1 << 20
GB = 1_000_000_000
ROOT = Path("/")

JETSON_OS_BYTES = 1_100_000_000
JETSON_OS = "headless Linux and services, 1.1 GB on an 8 GB module (NVIDIA's memory blog) [S]"
NANO_MEMORY = "MemTotal 7,620 MiB in tegrastats logs [S]"
ROWS = "rows of NVIDIA's Edge-LLM 0.9 performance page against its roofline"


@dataclass(frozen=True)
class Shares:
    """What part of the peak is reached, and how that is known."""

    bandwidth: float
    prefill: float
    vision: float
    source: str


# Lower ends of what Edge-LLM reached: 67 to 77 %, 82 to 90 %, 75 %, 78 to 88 % of bandwidth.
AGX_SHARES = Shares(0.67, 0.39, 0.42, f"lower ends on AGX Orin 64, {ROWS} [S]")
NX_SHARES = Shares(0.82, 0.53, 0.56, f"lower ends on Orin NX 16, {ROWS} [S]")
NANO_SHARES = Shares(0.75, 0.42, 0.45, f"lower ends on Orin Nano 8, {ROWS} [S]")
THOR_SHARES = Shares(0.78, 0.10, 0.25, f"lower ends on Thor, {ROWS} [S]")
CARD_SHARES = Shares(0.67, 0.39, 0.42, "those of AGX Orin 64, for want of others [K]")


@dataclass(frozen=True)
class Device:
    """`memory_bytes`: what the system counts as there. None: not known, so nothing is projected."""

    name: str
    title: str
    memory_bytes: int
    memory_source: str
    executor: ExecutorName
    os_bytes: int = 0
    os_source: str = "nothing is taken off"
    bandwidth_gb_s: float | None = None
    fp16_tflops: float | None = None
    speed_source: str = "not known"
    shares: Shares | None = None

    @property
    def usable_bytes(self) -> int:
        """What is left for this program."""
        return max(0, self.memory_bytes - self.os_bytes)


def _jetson(
    name: str,
    title: str,
    memory: tuple[int, str],
    speed: tuple[float, float, str] | None = None,
    shares: Shares | None = None,
) -> Device:
    return Device(
        name,
        title,
        *memory,
        executor="tensorrt",
        os_bytes=JETSON_OS_BYTES,
        os_source=JETSON_OS,
        bandwidth_gb_s=speed[0] if speed else None,
        fp16_tflops=speed[1] if speed else None,
        speed_source=speed[2] if speed else "not published in what we read",
        shares=shares,
    )


def _card(gib: int, bandwidth: float, tflops: float, card: str) -> Device:
    return Device(
        f"rtx-{gib}gb",
        f"RTX card with {gib} GB",
        gib << 30,
        "the card's size",
        executor="tensorrt-rtx",
        os_bytes=512 * MIB,
        os_source="driver and a display, 512 MiB [K]",
        bandwidth_gb_s=bandwidth,
        fp16_tflops=tflops,
        speed_source=f"{card}, the slowest of that size that we know of; FP16, FP32 sums [K]",
        shares=CARD_SHARES,
    )


_DEVICES = (
    _jetson(
        "orin-nano-4gb",
        "Jetson Orin Nano 4GB",
        (3810 * MIB, "half of the 8 GB module's MemTotal [K]"),
        (34.0, 5.1, "34 GB/s [S]; 4 SM x 2,048 FLOP x 0.625 GHz [K]"),
        NANO_SHARES,
    ),
    _jetson(
        "orin-nano-8gb",
        "Jetson Orin Nano 8GB",
        (7620 * MIB, NANO_MEMORY),
        (68.3, 10.2, "68 GB/s [S]; 8 SM x 2,048 FLOP x 0.625 GHz [K]"),
        NANO_SHARES,
    ),
    _jetson(
        "orin-nano-8gb-super",
        "Jetson Orin Nano 8GB, Super modes",
        (7620 * MIB, NANO_MEMORY),
        (102.4, 16.7, "102 GB/s at EMC 3,199 MHz [S]; 8 SM x 2,048 FLOP x 1.02 GHz [K]"),
        NANO_SHARES,
    ),
    _jetson(
        "orin-nx-8gb",
        "Jetson Orin NX 8GB",
        (7620 * MIB, "as Orin Nano 8GB [K]"),
        (102.4, 12.5, "102.4 GB/s [S]; 8 SM x 2,048 FLOP x 0.765 GHz [K]"),
        NX_SHARES,
    ),
    _jetson(
        "orin-nx-16gb",
        "Jetson Orin NX 16GB",
        (14486 * MIB, "deviceQuery on JetPack 5 [S]"),
        (102.4, 15.0, "102.4 GB/s [S]; 8 SM x 2,048 FLOP x 0.918 GHz [K]"),
        NX_SHARES,
    ),
    _jetson(
        "agx-orin-32gb",
        "Jetson AGX Orin 32GB",
        (30_600_000_000, "about 30.6 GB [K]"),
        (204.8, 26.7, "204.8 GB/s [S]; 14 SM x 2,048 FLOP x 0.93 GHz [K]"),
        AGX_SHARES,
    ),
    _jetson(
        "agx-orin-64gb",
        "Jetson AGX Orin 64GB",
        (62_800_000_000, "62.8 GB, llama.cpp#29142 [S]"),
        (204.8, 42.6, "204.8 GB/s [S]; 16 SM x 2,048 FLOP x 1.3 GHz [K]"),
        AGX_SHARES,
    ),
    _jetson(
        "agx-orin-industrial-64gb",
        "Jetson AGX Orin Industrial 64GB",
        (62_800_000_000, "as AGX Orin 64GB [K]"),
        (204.8, 39.3, "204.8 GB/s, 16 SM x 2,048 FLOP x 1.2 GHz [K]"),
        AGX_SHARES,
    ),
    _jetson("thor-t2000", "Jetson Thor T2000", (15_200_000_000, "16 GB [U] less 5 % [K]")),
    _jetson("thor-t3000", "Jetson Thor T3000", (30_400_000_000, "32 GB [U] less 5 % [K]")),
    _jetson(
        "thor-t4000",
        "Jetson Thor T4000",
        (61 * GB, "64 GB [S] less 5 % [K]"),
        (273.0, 150.0, "273 GB/s, 600 TFLOPS of dense FP4 [S], a quarter of it in FP16 [K]"),
        THOR_SHARES,
    ),
    _jetson(
        "thor-t5000",
        "Jetson Thor T5000",
        (122 * GB, "about 122 GB of 128 [K]"),
        (273.0, 258.0, "273 GB/s, 258 TFLOPS of dense FP16 [S]"),
        THOR_SHARES,
    ),
    _card(6, 168.0, 13.6, "RTX 3050 6GB"),
    _card(8, 224.0, 18.2, "RTX 3050 8GB"),
    _card(10, 760.0, 59.5, "RTX 3080"),
    _card(12, 360.0, 25.5, "RTX 3060"),
    _card(16, 288.0, 44.1, "RTX 4060 Ti 16GB"),
    _card(24, 936.0, 71.0, "RTX 3090"),
    _card(32, 1792.0, 209.5, "RTX 5090"),
    _card(48, 768.0, 154.8, "RTX A6000"),
)
DEVICES: Mapping[str, Device] = {device.name: device for device in _DEVICES}
THIS_MACHINE = "this-machine"


def find_device(name: str, root: Path = ROOT) -> Device:
    """A device by name, this machine, or a number of bytes such as 8GiB. Raises BuildError."""
    if name in DEVICES:
        return DEVICES[name]
    if name == THIS_MACHINE:
        return _this_machine(root)
    try:
        nbytes = byte_size(name)
    except argparse.ArgumentTypeError:
        nbytes = 0
    if nbytes < 1:
        raise BuildError(
            f"there is no device {name!r}; there are {', '.join(DEVICES)}, {THIS_MACHINE}, "
            "or a number of bytes such as 8GiB"
        )
    return Device(name, f"{nbytes:,} bytes of memory", nbytes, "as given", executor="tensorrt")


def _this_machine(root: Path) -> Device:
    """MemAvailable, never MemFree, which is near zero after a model was copied. [measured now]"""
    available = read_memory(FileSystem(root)).obtainable
    if available is None:
        raise BuildError(f"{root} says no MemAvailable; give --device a number of bytes instead")
    return Device(
        THIS_MACHINE,
        "this machine",
        available,
        "MemAvailable or what the cgroup leaves, now",
        executor="host",
        os_bytes=headroom(available),
        os_source="headroom for others, a tenth and at least 600 MiB, as `edgevlm doctor` keeps",
        speed_source="not measured; `edgevlm bench` times a bundle",
    )


def planning_target(device: Device, executor: str | None = None) -> Target:
    """What to plan for on a device. A Jetson can be planned for where it cannot be compiled for."""
    wanted = executor or device.executor
    if wanted == "tensorrt":
        return TARGETS.get(device.name) or board_target(device.name, "native")
    return next(target for target in TARGETS.values() if target.executor == wanted)
