"""What a machine lacks to run edgevlm well, whichever bundle: found, needed, and what to type.

It judges facts that `device` has read, and reads nothing itself.
"""

from dataclasses import dataclass
from typing import Literal

from edgevlm.boards import BAD_L4T, version_numbers
from edgevlm.device import Machine, usable_bytes
from edgevlm.meminfo import MIB, headroom, mib

Status = Literal["ok", "warn", "fail"]
MIN_GLIBC = (2, 28)  # the wheels of numpy, tokenizers and cuda-bindings: manylinux_2_28
MIN_PYTHON = (3, 10)
MIN_USABLE = 1024 * MIB
MIN_CMA = 16 * MIB
TOP_BLOCK = 4 * MIB  # the largest that a kernel with 4 KiB pages keeps

UPGRADE_L4T = (
    "sudo sed -i s/r36.4/r36.5/ /etc/apt/sources.list.d/nvidia-l4t-apt-source.list && "
    "sudo apt update && sudo apt dist-upgrade && sudo reboot"
)
HEADLESS = "sudo systemctl set-default multi-user.target && sudo reboot"
NO_ZRAM = "sudo systemctl disable --now nvzramconfig && sudo reboot"
SWAP_FILE = (
    "sudo fallocate -l 8G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && "
    "sudo swapon /swapfile"
)
DROP_CACHES = "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches"


@dataclass(frozen=True)
class Check:
    """One finding. `remedy` is empty where there is nothing to do."""

    name: str
    status: Status
    found: str
    needed: str = ""
    remedy: str = ""


def machine_checks(machine: Machine) -> list[Check]:
    """Everything that can be said without a bundle."""
    return [
        _system(machine),
        _python(machine),
        _board(machine),
        _l4t(machine),
        _gpu(machine),
        _tensorrt(machine),
        _cuda_bindings(machine),
        _onnxruntime(machine),
        _memory(machine),
        _cgroup(machine),
        *memory_conditions(machine),
        _power(machine),
    ]


def memory_conditions(machine: Machine) -> list[Check]:
    """What makes memory scarcer or more fragmented than it need be."""
    return [
        _largest_block(machine),
        _cma(machine),
        _zram(machine),
        _swap(machine),
        _desktop(machine),
    ]


def _system(machine: Machine) -> Check:
    kernel = None if machine.kernel is None else f"Linux {machine.kernel}"
    glibc = None if machine.glibc is None else f"glibc {machine.glibc}"
    parts = (machine.system, kernel, machine.arch, glibc)
    found = ", ".join(part for part in parts if part) or "unknown"
    needed = "Linux with glibc 2.28 or later"
    if machine.glibc is not None and version_numbers(machine.glibc) < MIN_GLIBC:
        return Check("system", "fail", found, needed, "install Ubuntu 22.04 or later")
    return Check("system", "ok", found, needed)


def _python(machine: Machine) -> Check:
    found, needed = machine.python or "unknown", "3.10 or later"
    version = version_numbers(found)[:2]
    if version and version < MIN_PYTHON:
        remedy = "flash JetPack 6.2.2 or 7.2.1" if machine.is_jetson else "install Python 3.12"
        return Check("python", "fail", found, needed, remedy)
    release = machine.jetpack
    if version and release and release.lowering and version != version_numbers(release.python):
        return Check(
            "python",
            "warn",
            found,
            f"{release.python}: JetPack {release.version} has TensorRT for that Python only",
            f"/usr/bin/python{release.python} -m venv --system-site-packages ~/edgevlm-venv",
        )
    return Check("python", "ok", found, needed)


def _board(machine: Machine) -> Check:
    if machine.board is not None:
        return Check("board", "ok", f"{machine.board.name} ({machine.board.part})")
    if not machine.is_jetson:
        return Check("board", "ok", "not a Jetson")
    return Check(
        "board",
        "warn",
        " ".join(filter(None, (machine.model, machine.soc))) or "a Jetson of unknown kind",
        "a module of docs/supported-boards.md",
        "plan with a number of bytes in place of a board's name: edgevlm plan MODEL --device 7GiB",
    )


def _l4t(machine: Machine) -> Check:
    release, l4t = machine.jetpack, machine.l4t
    if not machine.is_jetson:
        return Check("l4t", "ok", "not a Jetson")
    needed = "L4T 36.4.0 to 36.5 (JetPack 6.1 to 6.2), or 39.2 (JetPack 7.2)"
    if l4t is None:
        remedy = "mount the host's file into the container: -v /etc/nv_tegra_release:"
        remedy += "/etc/nv_tegra_release:ro"
        return Check("l4t", "warn", "unknown: no /etc/nv_tegra_release", needed, remedy)
    if release is None:
        return Check("l4t", "warn", f"{l4t}, which edgevlm does not know", needed, "edgevlm verify")
    found = f"{l4t} (JetPack {release.version})"
    if release.lowering is None:
        return Check("l4t", "fail", found, needed, "flash JetPack 6.2.2 or 7.2.1")
    if l4t == BAD_L4T:
        needed = "not 36.4.7: large CUDA allocations fail there, however much is free"
        return Check("l4t", "warn", found, needed, UPGRADE_L4T)
    if release.lowering == "classic" and version_numbers(l4t) >= (38,):
        needed = "39.2 (JetPack 7.2), the first for Thor with TensorRT's own attention"
        return Check("l4t", "warn", found, needed, "flash JetPack 7.2.1")
    return Check("l4t", "ok", found, needed)


def _gpu(machine: Machine) -> Check:
    libraries = machine.libraries
    if machine.gpu is None:
        return Check("gpu", "ok", "no NVIDIA GPU; bundles for the target host run on the CPU")
    capability, driver = machine.compute_capability, libraries.driver
    found = ", ".join(
        (
            machine.gpu_name or machine.soc or "NVIDIA GPU",
            machine.gpu,
            f"compute capability {capability or 'unknown'}",
            f"driver {driver or 'unknown'}",
        )
    )
    if libraries.libcuda is None:
        remedy = "install NVIDIA's driver"
        if machine.is_jetson:
            remedy = "sudo apt install nvidia-l4t-cuda; in a container: docker run --runtime nvidia"
        return Check("gpu", "warn", f"{found}, no libcuda.so.1", "libcuda.so.1", remedy)
    return Check("gpu", "ok", f"{found}, {libraries.libcuda}")


def _tensorrt(machine: Machine) -> Check:
    libraries, release = machine.libraries, machine.jetpack
    found, python = libraries.tensorrt, libraries.tensorrt_python
    if machine.gpu is None:
        return Check("tensorrt", "ok", found or libraries.tensorrt_rtx or "none, nor a GPU for it")
    if not machine.is_jetson:
        have = [f"TensorRT {python}"] if python else []
        if libraries.tensorrt_rtx:
            have.append(f"TensorRT-RTX {libraries.tensorrt_rtx}")
        if have:
            return Check("tensorrt", "ok", ", ".join(have))
        return Check(
            "tensorrt", "warn", "none", "TensorRT-RTX or TensorRT", "pip install 'edgevlm[rtx]'"
        )
    needed = "10.3 or later, from JetPack"
    if release is not None and release.lowering is not None:
        needed = f"{release.tensorrt}, which JetPack {release.version} has"
    install = "sudo apt install tensorrt python3-libnvinfer"
    if found is None:
        return Check("tensorrt", "warn", "none", needed, install)
    if version_numbers(found) >= (11,):
        remedy = f"pip uninstall tensorrt; {install}"
        needed += "; no TensorRT 11 supports JetPack"
        return Check("tensorrt", "warn", found, needed, remedy)
    if version_numbers(found) < (10, 3):
        return Check("tensorrt", "fail", found, needed, "flash JetPack 6.2.2 or 7.2.1")
    if python is None:
        version = release.python if release is not None else "3"
        remedy = f"sudo apt install python3-libnvinfer; /usr/bin/python{version} -m venv "
        remedy += "--system-site-packages ~/edgevlm-venv"
        found += ", but not for this Python"
        return Check("tensorrt", "warn", found, "its Python module", remedy)
    return Check("tensorrt", "ok", found, needed)


def _cuda_bindings(machine: Machine) -> Check:
    found, release = machine.libraries.cuda_bindings, machine.jetpack
    if machine.gpu is None:
        return Check("cuda-bindings", "ok", found or "none, nor a GPU for it")
    extra = "rtx"
    if machine.is_jetson:
        old = release is not None and release.cuda.startswith("12.")
        extra = "jetson6" if old else "jetson7"
    remedy = f"pip install 'edgevlm[{extra}]'"
    needed = {"jetson6": "12.x", "jetson7": "13.x"}.get(extra, "12.x or 13.x, as the driver")
    if found is None:
        return Check("cuda-bindings", "warn", "none", needed, remedy)
    if extra != "rtx" and found.split(".")[0] != needed.split(".")[0]:
        return Check("cuda-bindings", "warn", found, needed, remedy)
    return Check("cuda-bindings", "ok", found, needed)


def _onnxruntime(machine: Machine) -> Check:
    found = machine.libraries.onnxruntime
    if found is None and machine.gpu is None:
        needed = "ONNX Runtime, to run bundles on the CPU"
        return Check("onnxruntime", "warn", "none", needed, "pip install 'edgevlm[host]'")
    return Check("onnxruntime", "ok", found or "none; only bundles for the target host need it")


def _memory(machine: Machine) -> Check:
    memory, usable = machine.memory, usable_bytes(machine)
    needed = f"{mib(MIN_USABLE)} usable"
    if memory.obtainable is None or usable is None:
        found = "unknown: /proc/meminfo has no MemAvailable"
        return Check("memory", "warn", found, needed, "mount /proc where edgevlm runs")
    total = "" if memory.total is None else f" of {mib(memory.total)}"
    found = f"{mib(memory.obtainable)} available{total}, {mib(usable)} usable after a headroom of "
    found += mib(headroom(memory.obtainable))
    if usable < MIN_USABLE:
        remedy = "close other programs, then run edgevlm doctor again"
        if machine.desktop_running:
            remedy = "sudo systemctl isolate multi-user.target"
        return Check("memory", "warn", found, needed, remedy)
    return Check("memory", "ok", found, needed)


def _cgroup(machine: Machine) -> Check:
    memory = machine.memory
    if memory.cgroup_limit is None:
        return Check("cgroup limit", "ok", "none")
    found = f"{mib(memory.cgroup_limit)}, {mib(memory.cgroup_available or 0)} of it left"
    return Check("cgroup limit", "ok", found)


def _largest_block(machine: Machine) -> Check:
    block, count = machine.memory.largest_free_block, machine.memory.largest_free_blocks
    name, needed = "largest free block", f"{mib(TOP_BLOCK)} on a Jetson"
    if block is None:
        return Check(name, "ok", "unknown")
    found = f"{count} x {block // 1024:,} KiB"
    if machine.is_jetson and block < TOP_BLOCK:
        remedy = "echo 1 | sudo tee /proc/sys/vm/compact_memory, or reboot"
        return Check(name, "warn", f"{found}: memory is fragmented", needed, remedy)
    return Check(name, "ok", found, needed)


def _cma(machine: Machine) -> Check:
    total, free = machine.memory.cma_total, machine.memory.cma_free
    if total is None or free is None:
        return Check("cma", "ok", "unknown")
    found = f"{mib(free)} free of {mib(total)}"
    if machine.is_jetson and total and free < MIN_CMA:
        return Check("cma", "warn", found, f"{mib(MIN_CMA)} free", DROP_CACHES)
    return Check("cma", "ok", found)


def _zram(machine: Machine) -> Check:
    zram = machine.memory.zram
    if zram is None:
        return Check("zram", "ok", "unknown")
    if zram and machine.is_jetson:
        needed = "no zram: it lies in the same memory, and CUDA's pages cannot go there"
        return Check("zram", "warn", mib(zram), needed, NO_ZRAM)
    return Check("zram", "ok", mib(zram) if zram else "none")


def _swap(machine: Machine) -> Check:
    disk = machine.memory.disk_swap
    if disk is None:
        return Check("swap", "ok", "unknown")
    if machine.is_jetson and not disk and (machine.memory.total or 0) < 20 << 30:
        needed = "a file on NVMe, where other programs' pages can go while engines are compiled"
        return Check("swap", "warn", "none on disk", needed, SWAP_FILE)
    return Check("swap", "ok", f"{mib(disk)} on disk" if disk else "none on disk")


def _desktop(machine: Machine) -> Check:
    running, at_boot = machine.desktop_running, machine.desktop_at_boot
    if running is None and at_boot is None:
        return Check("desktop", "ok", "unknown")
    shown = running if running is not None else at_boot
    if shown and machine.is_jetson:
        needed = "no desktop: it takes about 800 MiB of the memory that the GPU shares"
        return Check("desktop", "warn", "running", needed, HEADLESS)
    return Check("desktop", "ok", "running" if shown else "not running")


def _power(machine: Machine) -> Check:
    power = machine.power
    if power.mode_id is None:
        return Check("power mode", "ok", "unknown" if machine.is_jetson else "not a Jetson")
    found = power.mode or f"mode {power.mode_id}"
    if power.gpu_mhz is not None:
        most = "" if power.gpu_max_mhz is None else f" of {power.gpu_max_mhz:,}"
        found += f", GPU at {power.gpu_mhz:,}{most} MHz"
    if power.emc_mhz is not None:
        found += f", memory at {power.emc_mhz:,} MHz"
    if power.fastest_id is not None and power.fastest_id != power.mode_id:
        remedy = f"sudo nvpmodel -m {power.fastest_id} && sudo jetson_clocks"
        return Check("power mode", "warn", found, f"{power.fastest}, for full speed", remedy)
    return Check("power mode", "ok", found)
