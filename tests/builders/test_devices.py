"""Devices: every fact says where it is from; this machine is judged by MemAvailable."""

import re
from pathlib import Path

import pytest

from builders.devices import DEVICES, find_device, planning_target
from edgevlm.boards import BOARDS
from edgevlm.errors import BuildError

GIB = 1 << 30


def machine(root: Path, free_mib: int, available_mib: int) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(
        f"MemTotal:        7802880 kB\nMemFree:         {free_mib * 1024} kB\n"
        f"MemAvailable:    {available_mib * 1024} kB\nCached:          6000000 kB\n"
    )
    return root


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_device_names_its_sources(device) -> None:
    for text in (device.memory_source, device.os_source):
        assert re.search(r"\[[SKU]\]|the card's size", text)
    assert 0 < device.usable_bytes < device.memory_bytes
    assert (device.bandwidth_gb_s is None) == (device.fp16_tflops is None)
    if device.bandwidth_gb_s is not None:
        assert re.search(r"\[[SK]\]", device.speed_source)
        assert device.shares is not None and re.search(r"\[[SK]\]", device.shares.source)
        assert 0 < device.shares.bandwidth < 0.95


def test_every_board_that_is_recognised_can_be_planned_for() -> None:
    assert {board.device for board in BOARDS} <= set(DEVICES)
    for board in BOARDS:
        device = DEVICES[board.device]
        assert device.memory_bytes < board.memory_gb * GIB
        assert planning_target(device).executor == "tensorrt"


def test_an_8_gb_module_has_what_nvidia_says() -> None:
    device = find_device("orin-nano-8gb")
    assert device.memory_bytes == 7620 << 20
    assert device.usable_bytes == (7620 << 20) - 1_100_000_000


def test_this_machine_is_what_is_available_not_what_is_free(tmp_path: Path) -> None:
    device = find_device("this-machine", machine(tmp_path, free_mib=120, available_mib=7000))
    assert device.memory_bytes == 7000 << 20
    assert device.usable_bytes == (7000 - 700) << 20  # the same headroom as edgevlm doctor's
    assert planning_target(device).executor == "host"
    assert planning_target(device, "tensorrt").executor == "tensorrt"


def test_a_machine_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="MemAvailable"):
        find_device("this-machine", tmp_path)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8GiB", 8 * GIB), ("512MiB", GIB // 2), ("1000", 1000)]
)
def test_a_number_of_bytes_is_a_device(text: str, nbytes: int) -> None:
    assert find_device(text).usable_bytes == nbytes


@pytest.mark.parametrize("name", ["orin", "", "-8GiB", "0", "8 bananas", "nan"])
def test_an_unknown_device_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(BuildError, match=r"no device.*orin-nano-8gb.*this-machine"):
        find_device(name)
