"""A machine's facts from trees of files: right where they are there, None where they are not."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgevlm.boards import BOARDS, JETPACKS, SOURCES, find_jetpack, same_version, version_numbers
from edgevlm.device import Machine, read_machine, usable_bytes
from edgevlm.errors import EdgeVLMError
from edgevlm.filesystem import FileSystem
from edgevlm.libraries import Libraries
from edgevlm.machine_checks import machine_checks
from edgevlm.meminfo import MIB, Memory, headroom, read_memory

TREES = Path(__file__).resolve().parents[1] / "trees"
NANO = "orin-nano-8gb-jp62"
FILES = sorted(
    path.relative_to(TREES / NANO) for path in (TREES / NANO).rglob("*") if path.is_file()
)


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    """A copy of the Orin Nano's tree, to change."""
    shutil.copytree(TREES / NANO, tmp_path / "nano", symlinks=True)
    return tmp_path / "nano"


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_orin_nano_on_jetpack_6_2() -> None:
    machine = read_machine(TREES / NANO)
    assert machine.arch == "aarch64"
    assert machine.kernel == "5.15.148-tegra"
    assert machine.system == "Ubuntu 22.04.5 LTS"
    assert (machine.python, machine.glibc) == ("3.10", "2.35")
    assert machine.board is not None and machine.board.part == "p3767-0005"
    assert machine.board.device == "orin-nano-8gb"
    assert machine.model == "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    assert (machine.soc, machine.compute_capability) == ("tegra234", "8.7")
    assert machine.l4t == "36.4.3"
    assert machine.jetpack is not None and machine.jetpack.version == "6.2"
    assert machine.gpu == "integrated"
    assert (machine.desktop_running, machine.desktop_at_boot) == (True, True)
    assert machine.libraries == Libraries(
        libcuda="/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1",
        driver="540.4.0",
        tensorrt="10.3.0.30-1+cuda12.5",
        tensorrt_python="10.3.0",
    )
    assert (machine.power.mode, machine.power.fastest_id) == ("25W", 2)
    assert (machine.power.gpu_mhz, machine.power.gpu_max_mhz) == (305, 918)
    assert machine.memory == Memory(
        total=7802892 * 1024,
        available=5012344 * 1024,
        free=1214520 * 1024,
        swap_total=3901440 * 1024,
        swap_free=3901440 * 1024,
        zram=3901440 * 1024,
        disk_swap=0,
        cma_total=262144 * 1024,
        cma_free=152184 * 1024,
        largest_free_block=4 * MIB,
        largest_free_blocks=118 + 101,
    )


@pytest.mark.parametrize(
    ("tree", "device", "l4t", "gpu", "capability", "driver"),
    [
        ("orin-nx-16gb-l4t-36.4.7", "orin-nx-16gb", "36.4.7", "integrated", "8.7", "540.4.0"),
        ("agx-orin-64gb-jp72", "agx-orin-64gb", "39.2.0", "integrated", "8.7", "595.78"),
        # Thor's GPU stands on PCI; it is no card all the same.
        ("thor-t5000-jp72", "thor-t5000", "39.2.0", "integrated", "11.0", "595.78"),
        ("desktop-rtx3060", None, None, "discrete", "8.6", "550.120"),
        ("laptop-no-gpu", None, None, None, None, None),
    ],
)
def test_other_machines(tree, device, l4t, gpu, capability, driver) -> None:
    machine = read_machine(TREES / tree)
    assert (machine.board.device if machine.board else None) == device
    assert (machine.l4t, machine.gpu, machine.compute_capability) == (l4t, gpu, capability)
    assert machine.libraries.driver == driver
    assert machine.is_jetson == (l4t is not None)


def test_the_emc_clock_where_root_made_it_readable() -> None:
    assert read_machine(TREES / "agx-orin-64gb-jp72").power.emc_mhz == 3199
    assert read_machine(TREES / NANO).power.emc_mhz is None


def test_page_cache_counts_as_available(nano: Path) -> None:
    # ollama#12283: a board that has copied a model has 0.5 GB free and 12 GB available.
    write(nano, "proc/meminfo", "MemTotal: 15957804 kB\nMemFree: 524288 kB\nMemAvailable: "
          "12582912 kB\n")  # fmt: skip
    assert usable_bytes(read_machine(nano)) == 12582912 * 1024 * 9 // 10 + 1  # less a tenth


def test_headroom_is_a_tenth_or_600_mib() -> None:
    assert headroom(4096 * MIB) == 600 * MIB
    assert headroom(6000 * MIB) == 600 * MIB
    assert headroom(20000 * MIB) == 2000 * MIB
    assert usable_bytes(Machine(memory=Memory(available=100 * MIB))) == 0
    assert usable_bytes(Machine(memory=Memory(free=100 * MIB))) is None


@pytest.mark.parametrize(
    ("cgroup", "directory"),
    [
        ("0::/\n", "sys/fs/cgroup"),  # its own namespace, as Docker makes it
        ("0::/../../system.slice\n", "sys/fs/cgroup"),
        ("0::/docker/abc\n", "sys/fs/cgroup"),  # the path of outside, the mount of inside
        ("0::/a.slice/b.scope\n", "sys/fs/cgroup/a.slice"),  # a limit above
    ],
)
def test_a_containers_limit(nano: Path, cgroup: str, directory: str) -> None:
    write(nano, "proc/self/cgroup", cgroup)
    write(nano, f"{directory}/memory.max", f"{2048 * MIB}\n")
    write(nano, f"{directory}/memory.current", f"{1536 * MIB}\n")
    write(nano, f"{directory}/memory.stat", f"anon 1\nactive_file {100 * MIB}\ninactive_file "
          f"{924 * MIB}\n")  # fmt: skip
    memory = read_memory(FileSystem(nano))
    assert memory.cgroup_limit == 2048 * MIB
    # What is cached can be had: 1,536 less 1,024 are in use.
    assert memory.cgroup_available == memory.obtainable == 1536 * MIB
    assert usable_bytes(read_machine(nano)) == (1536 - 600) * MIB


def test_a_limit_of_cgroup_v1_and_none(nano: Path) -> None:
    write(nano, "proc/self/cgroup", "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/x\n")
    base = nano / "sys/fs/cgroup/memory"
    write(base, "memory.limit_in_bytes", "9223372036854771712\n")
    write(base, "memory.usage_in_bytes", "1\n")
    assert read_memory(FileSystem(nano)).cgroup_limit is None
    write(base, "docker/ab/memory.limit_in_bytes", str(1024 * MIB))
    write(base, "docker/ab/memory.usage_in_bytes", str(512 * MIB))
    write(base, "docker/ab/memory.stat", f"inactive_file 0\ntotal_inactive_file {12 * MIB}\n")
    memory = read_memory(FileSystem(nano))
    assert (memory.cgroup_limit, memory.obtainable) == (1024 * MIB, 524 * MIB)


def test_a_container_without_a_device_tree_is_known_by_its_boot_control(nano: Path) -> None:
    shutil.rmtree(nano / "proc/device-tree")
    machine = read_machine(nano)
    assert machine.board is not None and machine.board.part == "p3767-0005"
    assert machine.soc == "tegra234"


def test_l4t_from_dpkg_where_the_release_file_is_gone(nano: Path) -> None:
    (nano / "etc/nv_tegra_release").unlink()
    assert read_machine(nano).l4t == "36.4.3"


def test_a_package_that_was_removed_does_not_count(nano: Path) -> None:
    status = (nano / "var/lib/dpkg/status").read_text()
    removed = status.replace("Status: install ok installed", "Status: deinstall ok config-files")
    write(nano, "var/lib/dpkg/status", removed)
    assert read_machine(nano).libraries.tensorrt == "10.3.0"  # from the Python package


def test_tensorrt_by_the_name_of_its_library(nano: Path) -> None:
    shutil.rmtree(nano / "var")
    shutil.rmtree(nano / "usr/lib/python3.10")
    write(nano, "usr/lib/aarch64-linux-gnu/libnvinfer.so.10.3.0", "")
    assert read_machine(nano).libraries.tensorrt == "10.3.0"


def test_libcuda_through_the_linkers_cache(nano: Path) -> None:
    (nano / "usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1").unlink()
    assert read_machine(nano).libraries.libcuda is None
    write(nano, "opt/nv/libcuda.so.1", "")
    (nano / "etc/ld.so.cache").write_bytes(b"glibc\0/lib/libc.so.6\0/opt/nv/libcuda.so.1\0")
    assert read_machine(nano).libraries.libcuda == "/opt/nv/libcuda.so.1"


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.arch == os.uname().machine
    assert machine.memory.total is not None and machine.memory.available is not None
    assert machine.memory.available <= machine.memory.total


def test_an_empty_root_is_all_none(tmp_path: Path) -> None:
    assert read_machine(tmp_path) == Machine(root=str(tmp_path))


def test_a_root_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "nothing"):
        with pytest.raises(EdgeVLMError, match=f"{path.name} is not a directory; give the root"):
            read_machine(path)


def test_directories_pipes_and_loops_in_place_of_files(nano: Path) -> None:
    for path, replace in (
        ("proc/meminfo", lambda p: p.mkdir()),
        ("proc/swaps", os.mkfifo),  # must not wait for a writer
        ("etc/nv_tegra_release", lambda p: p.symlink_to(p.name)),
        ("etc/os-release", lambda p: p.symlink_to("nowhere")),
    ):
        (nano / path).unlink()
        replace(nano / path)
    machine = read_machine(nano)
    assert machine.memory.total is machine.memory.zram is machine.system is None
    assert machine.l4t == "36.4.3"  # dpkg knows it too


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_files_without_permission(nano: Path) -> None:
    for path in FILES:
        (nano / path).chmod(0)
    assert read_machine(nano).memory == Memory()


def test_permission_denied_is_none(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    machine = read_machine(nano)
    assert (machine.memory, machine.board, machine.l4t) == (Memory(), None, None)


GARBAGE = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")),
    st.integers(0, 10**30).map(lambda number: str(number).encode()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_bytes_in_any_file_never_raise(nano: Path, data: st.DataObject) -> None:
    path = nano / data.draw(st.sampled_from(FILES))
    before = path.read_bytes()
    garbage = data.draw(GARBAGE)
    keep = data.draw(st.integers(0, len(before)))
    path.write_bytes(data.draw(st.sampled_from([garbage, before[:keep] + garbage])))
    try:
        for check in machine_checks(read_machine(nano)):
            assert check.found
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("l4t", "jetpack"),
    [
        ("36.4.0", "6.1"), ("36.4.3", "6.2"), ("36.4.7", "6.2.1"), ("36.5.0", "6.2.2"),
        ("36.5.1", "6.2.3"), ("38.4.0", "7.1"), ("39.2.0", "7.2"), ("39.2.1", "7.2.1"),
        ("35.4.1", "5.1.2"), ("40.1.0", None), ("", None),
    ],
)  # fmt: skip
def test_jetpack_of_an_l4t(l4t: str, jetpack: str | None) -> None:
    release = find_jetpack(l4t)
    assert (release.version if release else None) == jetpack


def test_every_row_has_a_source() -> None:
    assert {row.source for row in (*BOARDS, *JETPACKS)} <= set(SOURCES)
    assert len({board.part for board in BOARDS}) == len(BOARDS)


def test_boards_have_the_names_that_can_be_planned_for() -> None:
    devices = pytest.importorskip("builders.devices").DEVICES
    assert {board.device for board in BOARDS} <= set(devices)


def test_versions() -> None:
    assert version_numbers("10.3.0.30-1+cuda12.5") == (10, 3, 0, 30)
    assert version_numbers("12.6.2.post1") == (12, 6, 2)
    assert version_numbers("no") == ()
    assert same_version("10.3.0", "10.3.0.30-1+cuda12.5")
    assert not same_version("10.3.0", "10.16.2.10")
    assert not same_version("", "10.3")
