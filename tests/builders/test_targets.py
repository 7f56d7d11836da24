"""Boards elsewhere and boards here: what is compiled, what is prepared, in which lowering."""

import dataclasses
from pathlib import Path

import pytest

from builders.blocks import WeightPolicy
from builders.devices import DEVICES, planning_target
from builders.planner import text_stage_plans
from builders.presets import find_model
from builders.room import STAGE_BYTES, compile_peak, require_room, stage_limit
from builders.targets import TARGETS, find_target, lowering_for
from edgevlm.device import read_machine, usable_bytes
from edgevlm.errors import BuildError
from edgevlm.libraries import Libraries
from edgevlm.meminfo import Memory

TREES = Path(__file__).resolve().parents[1] / "trees"
BOARDS = ("orin-nano-8gb", "orin-nx-16gb", "agx-orin-64gb", "thor")


def machine_of(tree: str, tensorrt: str | None = None):
    """A machine of the trees, with another TensorRT where one is given."""
    machine = read_machine(TREES / tree)
    if tensorrt is None:
        return machine
    libraries = Libraries(tensorrt=tensorrt, tensorrt_python=tensorrt)
    return dataclasses.replace(machine, libraries=libraries)


@pytest.mark.parametrize("name", BOARDS)
def test_boards_are_prepared_elsewhere(name):
    laptop = machine_of("laptop-no-gpu")
    target = find_target(name, laptop)
    assert target == TARGETS[name]
    assert (target.executor, target.here, target.compiler.name) == ("tensorrt", False, "tensorrt")
    assert target.stage_limit == STAGE_BYTES
    assert lowering_for(target).name == ("native" if name == "thor" else "classic")
    assert lowering_for(target, "native").name == "native"
    assert lowering_for(target, "classic").name == "classic"


@pytest.mark.parametrize(
    ("tree", "tensorrt", "name", "lowerings"),
    [
        ("orin-nano-8gb-jp62", "10.3.0.30", "orin-nano-8gb", ("classic",)),
        ("agx-orin-64gb-jp72", "10.16.2.10", "agx-orin-64gb", ("native", "classic")),
        ("thor-t5000-jp72", "10.16.2.10", "thor", ("native", "classic")),
        ("thor-t5000-jp72", "10.13.3.9", "thor", ("classic",)),
    ],
)
def test_a_board_compiles_for_itself(tree, tensorrt, name, lowerings):
    machine = machine_of(tree, tensorrt)
    target = find_target(name, machine)
    assert target.here and target.lowerings == lowerings
    here = find_target("this-machine", machine)
    assert (here.here, here.lowerings, here.executor) == (True, lowerings, "tensorrt")
    assert target.stage_limit == stage_limit(usable_bytes(machine))
    if "native" not in lowerings:
        with pytest.raises(BuildError, match="no lowering 'native'"):
            lowering_for(target, "native")


def test_a_board_prepares_for_another():
    assert not find_target("orin-nx-16gb", machine_of("orin-nano-8gb-jp62", "10.3.0")).here


def test_this_machine_without_a_gpu_is_the_host():
    assert find_target("this-machine", machine_of("laptop-no-gpu")) == TARGETS["host"]


def test_a_board_without_tensorrt_or_with_an_old_one_is_told():
    bare = dataclasses.replace(machine_of("orin-nano-8gb-jp62"), libraries=Libraries())
    with pytest.raises(BuildError, match="has no TensorRT for this Python"):
        find_target("this-machine", bare)
    assert not find_target("orin-nano-8gb", bare).here
    with pytest.raises(BuildError, match="has TensorRT 8.5.2; edgevlm needs 10.3"):
        find_target("this-machine", machine_of("orin-nano-8gb-jp62", "8.5.2"))


def test_stages_shrink_with_memory_and_never_pass_a_gib():
    limits = [stage_limit(gib << 30) for gib in (1, 2, 3, 4, 6, 60)]
    assert limits == sorted(limits)
    assert limits[-1] == stage_limit(None) == STAGE_BYTES
    assert compile_peak(limits[2]) <= 3 << 30
    model = dataclasses.replace(find_model("qwen2.5-7b").config, image_processor=None)
    policy = WeightPolicy("int4", 128)
    whole = text_stage_plans(model, policy)
    assert len(text_stage_plans(model, policy, stage_limit(3 << 30))) > len(whole)


def test_too_little_memory_is_refused_with_both_numbers():
    """CASES 9: before any work, and not by a silent kill."""
    machine = dataclasses.replace(machine_of("laptop-no-gpu"), memory=Memory(available=3 << 30))
    usable, needed = usable_bytes(machine), compile_peak(STAGE_BYTES)
    with pytest.raises(BuildError, match=f"{needed:,}.*{usable:,}"):
        require_room(STAGE_BYTES, machine)
    require_room(64 << 20, machine)


def test_what_is_planned_for_a_board_is_what_is_built_for_it():
    for name in BOARDS[:3]:
        assert planning_target(DEVICES[name]) == TARGETS[name]
    assert planning_target(DEVICES["thor-t5000"]).executor == "tensorrt"
