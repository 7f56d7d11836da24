"""The facts of a machine that decide what it can run, read from its files.

It works on any Linux and on a tree copied from one; it needs no GPU, no vendor library, no NVML.
What cannot be read is None.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgevlm.boards import CHIP_IDS, COMPUTE_CAPABILITY, Board, JetPack, find_board, find_jetpack
from edgevlm.errors import EdgeVLMError
from edgevlm.filesystem import FileSystem
from edgevlm.libraries import Libraries, debian_architecture, dpkg_version, read_libraries
from edgevlm.meminfo import Memory, headroom, read_memory

# Names as /proc/PID/comm has them: at most 15 characters.
DESKTOP_PROCESSES = frozenset(
    ("gnome-shell", "Xorg", "Xwayland", "plasmashell", "kwin_x11", "kwin_wayland", "lxsession")
    + ("xfce4-session", "lxqt-session", "weston", "gdm-x-session", "gdm-wayland-ses")
)
# Families of cards by name, the first that matches: /proc has no compute capability [K].
CARDS = (
    (r"GB10\b", "12.1"),
    (r"RTX 50\d0|Blackwell", "12.0"),
    (r"B[23]00\b", "10.0"),
    (r"G?H[12]00\b|H20\b", "9.0"),
    (r"RTX 40\d0|\bAda\b|\bL4\b|\bL40", "8.9"),
    (r"RTX 30\d0|RTX A\d+|\bA(?:2|10|16|40)G?\b", "8.6"),
    (r"\bA(?:100|30)\b", "8.0"),
    (r"RTX 20\d0|GTX 16\d0|Quadro RTX|\bT4\b|TITAN RTX", "7.5"),
)


@dataclass(frozen=True)
class Power:
    """The mode that nvpmodel set, and clocks in MHz."""

    mode: str | None = None
    mode_id: int | None = None
    fastest: str | None = None
    fastest_id: int | None = None
    gpu_mhz: int | None = None
    gpu_max_mhz: int | None = None
    emc_mhz: int | None = None  # readable by root alone


@dataclass(frozen=True)
class Machine:
    """What is known about a machine. `gpu` None: no NVIDIA GPU was found."""

    root: str = "/"
    arch: str | None = None
    kernel: str | None = None
    system: str | None = None
    python: str | None = None
    glibc: str | None = None
    model: str | None = None
    soc: str | None = None
    board: Board | None = None
    l4t: str | None = None
    jetpack: JetPack | None = None
    gpu: Literal["integrated", "discrete"] | None = None
    gpu_name: str | None = None
    compute_capability: str | None = None
    desktop_running: bool | None = None
    desktop_at_boot: bool | None = None
    libraries: Libraries = Libraries()
    power: Power = Power()
    memory: Memory = Memory()

    @property
    def is_jetson(self) -> bool:
        """Whether NVIDIA's Jetson Linux, or a Tegra chip, is here."""
        return self.l4t is not None or self.soc is not None


def usable_bytes(machine: Machine) -> int | None:
    """What a plan may take: what can be had, less headroom. An own card's memory is not in it."""
    available = machine.memory.obtainable
    return None if available is None else max(0, available - headroom(available))


def read_machine(root: str | Path = "/") -> Machine:
    """Read a machine's files. Raises EdgeVLMError where `root` is no directory, and only then."""
    path = Path(root)
    if not os.path.isdir(path):
        raise EdgeVLMError(
            f"{root} is not a directory; give the root of a file system, with proc, sys and etc"
        )
    files = FileSystem(path.resolve())
    compatible = files.strings("proc/device-tree/compatible")
    boot_control = files.text("etc/nv_boot_control.conf") or ""
    soc = _soc(compatible, boot_control)
    l4t = _l4t(files)
    libraries = read_libraries(files)
    gpu, gpu_name = _gpu(files, soc, l4t, libraries)
    running, at_boot = _desktop(files)
    return Machine(
        root=str(files.root),
        arch=os.uname().machine if files.live else debian_architecture(files),
        kernel=_kernel(files),
        system=_system(files),
        python=_python(files),
        glibc=_glibc(files),
        model=" ".join(files.strings("proc/device-tree/model")).strip() or None,
        soc=soc,
        board=find_board(compatible, boot_control),
        l4t=l4t,
        jetpack=None if l4t is None else find_jetpack(l4t),
        gpu=gpu,
        gpu_name=gpu_name,
        compute_capability=_compute_capability(soc, gpu_name),
        desktop_running=running,
        desktop_at_boot=at_boot,
        libraries=libraries,
        power=_power(files),
        memory=read_memory(files),
    )


def _soc(compatible: tuple[str, ...], boot_control: str) -> str | None:
    if match := re.search(r"nvidia,(tegra[0-9]{3})\b", " ".join(compatible)):
        return match[1]
    # Docker hides the device tree; this file is mounted into containers.
    match = re.search(r"^TEGRA_CHIPID (0x[0-9a-f]+)\s*$", boot_control, re.MULTILINE)
    return CHIP_IDS.get(match[1]) if match else None


def _l4t(files: FileSystem) -> str | None:
    text = files.text("etc/nv_tegra_release") or ""
    if match := re.search(r"# R(\d{1,4}) \(release\), REVISION: (\d{1,4}(?:\.\d{1,4})*)", text):
        return f"{match[1]}.{match[2]}"
    match = re.match(r"[0-9]+\.[0-9]+\.[0-9]+", dpkg_version(files, "nvidia-l4t-core") or "")
    return match[0] if match else None


def _gpu(
    files: FileSystem, soc: str | None, l4t: str | None, libraries: Libraries
) -> tuple[Literal["integrated", "discrete"] | None, str | None]:
    name = None
    for gpu in files.names("proc/driver/nvidia/gpus"):
        text = files.text(f"proc/driver/nvidia/gpus/{gpu}/information") or ""
        if match := re.search(r"^Model:\s*(\S.*?)\s*$", text, re.MULTILINE):
            name = match[1]
            break
    if soc is not None or l4t is not None:  # Thor's own GPU stands on PCI like a card
        return "integrated", name
    if name is not None and re.search(r"\bGB10\b", name):
        return "integrated", name
    if name is not None or libraries.driver is not None:
        return "discrete", name
    return None, None


def _compute_capability(soc: str | None, gpu_name: str | None) -> str | None:
    if soc is not None:
        return COMPUTE_CAPABILITY.get(soc)
    for pattern, capability in CARDS:
        if gpu_name is not None and re.search(pattern, gpu_name):
            return capability
    return None


def _kernel(files: FileSystem) -> str | None:
    match = re.match(r"Linux version (\S+)", files.text("proc/version") or "")
    return match[1] if match else None


def _system(files: FileSystem) -> str | None:
    text = files.text("etc/os-release") or files.text("usr/lib/os-release") or ""
    match = re.search(r'^PRETTY_NAME="?([^"\n]*?)"?\s*$', text, re.MULTILINE)
    return (match[1] or None) if match else None


def _python(files: FileSystem) -> str | None:
    if files.live:
        return ".".join(map(str, sys.version_info[:3]))
    match = re.fullmatch(r"(?:.*/)?python(3\.[0-9]+)", files.link("usr/bin/python3") or "")
    return match[1] if match else None


def _glibc(files: FileSystem) -> str | None:
    if files.live and "CS_GNU_LIBC_VERSION" in os.confstr_names:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    else:
        text = dpkg_version(files, "libc6") or ""
    match = re.search(r"\b2\.[0-9]{1,4}", text)
    return match[0] if match else None


def _desktop(files: FileSystem) -> tuple[bool | None, bool | None]:
    """(running now, started at boot)."""
    running: bool | None = None
    for process in files.names("proc"):
        if process.isdecimal() and (comm := files.text(f"proc/{process}/comm")) is not None:
            running = running or comm.strip() in DESKTOP_PROCESSES
            if running:
                break
    target = files.link("etc/systemd/system/default.target")
    target = target or files.link("lib/systemd/system/default.target")
    target = target or files.link("usr/lib/systemd/system/default.target")
    return running, None if target is None else target.endswith("graphical.target")


def _power(files: FileSystem) -> Power:
    conf = files.text("etc/nvpmodel.conf") or ""
    pairs = re.findall(r"^<\s*POWER_MODEL\s+ID=([0-9]{1,4})\s+NAME=(\S+)\s*>", conf, re.MULTILINE)
    modes = {int(number): name for number, name in pairs}
    # The number of the fastest mode differs from board to board; its name does not.
    fastest = next((number for number, name in modes.items() if name.startswith("MAXN")), None)
    match = re.search(r"pmode:([0-9]{1,4})", files.text("var/lib/nvpmodel/status") or "")
    current = int(match[1]) if match else None
    emc = files.number("sys/kernel/debug/bpmp/debug/clk/emc/rate")
    gpu, gpu_max = _gpu_clock(files)
    return Power(
        mode=None if current is None else modes.get(current),
        mode_id=current,
        fastest=None if fastest is None else modes[fastest],
        fastest_id=fastest,
        gpu_mhz=gpu,
        gpu_max_mhz=gpu_max,
        emc_mhz=_mhz(emc),
    )


def _gpu_clock(files: FileSystem) -> tuple[int | None, int | None]:
    """(now, at most) in MHz."""
    for name in files.names("sys/class/devfreq"):
        if re.search(r"\.gpu$|\.g[av]1[01]b$|^gpu-gpc", name):
            now = files.number(f"sys/class/devfreq/{name}/cur_freq")
            most = files.number(f"sys/class/devfreq/{name}/max_freq")
            return _mhz(now), _mhz(most)
    return None, None


def _mhz(hertz: int | None) -> int | None:
    return None if hertz is None else hertz // 1_000_000
