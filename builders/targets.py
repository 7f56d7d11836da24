"""What a bundle can be built for, and which lowerings each target takes. A new board is one line.

A board's engines can only be made on it: elsewhere its bundles are prepared (`here` is False).
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from builders.blocks import Lowering
from builders.engine import Compiler
from builders.lowering.classic import ClassicLowering
from builders.lowering.host import HostLowering
from builders.lowering.native import NativeLowering
from builders.room import STAGE_BYTES, stage_limit
from edgevlm.boards import version_numbers
from edgevlm.checks import FIRST_TENSORRT
from edgevlm.device import Machine, read_machine, usable_bytes
from edgevlm.errors import BuildError

ExecutorName = Literal["host", "tensorrt", "tensorrt-rtx"]
THIS_MACHINE = "this-machine"


@dataclass(frozen=True)
class Target:
    """`lowerings`: the default first. `compiler` None: the executor takes graphs as they are.

    `here`: whether this machine compiles for it. `stage_limit`: bytes of weights in an engine.
    """

    name: str
    executor: ExecutorName
    lowerings: tuple[str, ...]
    compiler: Compiler | None = None
    here: bool = True
    stage_limit: int = STAGE_BYTES


def board_target(name: str, lowering: str) -> Target:
    """A board that is not this machine; `lowering` is the default."""
    other = "classic" if lowering == "native" else "native"
    return Target(name, "tensorrt", (lowering, other), Compiler("tensorrt", None), here=False)


LOWERINGS: dict[str, type[Lowering]] = {
    "host": HostLowering,
    "native": NativeLowering,
    "classic": ClassicLowering,
}
# JetPack 6, with TensorRT 10.3, takes classic alone; 7.2 takes both. Orins have either, Thors 7.2.
TARGETS = {
    target.name: target
    for target in (
        Target("host", "host", ("host",)),
        Target("rtx-sm86", "tensorrt-rtx", ("native", "classic"), Compiler("tensorrt-rtx", "SM86")),
        board_target("orin-nano-8gb", "classic"),
        board_target("orin-nx-16gb", "classic"),
        board_target("agx-orin-64gb", "classic"),
        board_target("thor", "native"),
    )
}


def find_target(name: str, machine: Machine | None = None) -> Target:
    """The target of that name, as this machine can build it. Raises BuildError."""
    if name == THIS_MACHINE:
        return _this_machine(machine or read_machine())
    if name not in TARGETS:
        known = ", ".join((*TARGETS, THIS_MACHINE))
        raise BuildError(f"there is no target {name!r}; there are {known}")
    target = TARGETS[name]
    if target.executor != "tensorrt":
        return target
    machine = machine or read_machine()
    board = machine.board.device if machine.board else ""
    is_it = board == name or (name == "thor" and board.startswith("thor"))
    return _on_board(target, machine) if is_it and machine.libraries.tensorrt_python else target


def lowering_for(target: Target, name: str | None = None) -> Lowering:
    """The lowering of that name, or the target's default. Raises BuildError."""
    wanted = name or target.lowerings[0]
    if wanted not in target.lowerings:
        raise BuildError(
            f"target {target.name} has no lowering {wanted!r}; it has {', '.join(target.lowerings)}"
        )
    return LOWERINGS[wanted]()


def _this_machine(machine: Machine) -> Target:
    """TensorRT where there is a GPU with it, else the host."""
    if machine.gpu is None:
        return TARGETS["host"]
    if machine.libraries.tensorrt_python is None:
        if not machine.is_jetson:
            return TARGETS["host"]
        raise BuildError(
            "this board has no TensorRT for this Python; `edgevlm doctor` says how to install it, "
            "or build with --target host"
        )
    name = machine.board.device if machine.board else THIS_MACHINE
    return _on_board(board_target(name, "native"), machine)


def _on_board(target: Target, machine: Machine) -> Target:
    """The target, compiled here: lowerings by TensorRT's version, stages by what is free."""
    version = machine.libraries.tensorrt or ""
    if version_numbers(version) < FIRST_TENSORRT["classic"]:
        raise BuildError(
            f"this machine has TensorRT {version or 'of an unknown version'}; edgevlm needs 10.3, "
            "which comes with JetPack 6.1"
        )
    native = version_numbers(version) >= FIRST_TENSORRT["native"]
    return dataclasses.replace(
        target,
        lowerings=("native", "classic") if native else ("classic",),
        here=True,
        stage_limit=stage_limit(usable_bytes(machine)),
    )
