"""What a bundle can be built for, and which lowerings each target takes. A new board is one line.

It names things; whether they are installed here is for the engine to find out.
"""

from dataclasses import dataclass
from typing import Literal

from builders.blocks import Lowering
from builders.engine import Compiler
from builders.lowering.classic import ClassicLowering
from builders.lowering.host import HostLowering
from builders.lowering.native import NativeLowering
from edgevlm.errors import BuildError

ExecutorName = Literal["host", "tensorrt", "tensorrt-rtx"]


@dataclass(frozen=True)
class Target:
    """`lowerings`: the default first. `compiler` None: the executor takes graphs as they are."""

    name: str
    executor: ExecutorName
    lowerings: tuple[str, ...]
    compiler: Compiler | None = None


LOWERINGS: dict[str, type[Lowering]] = {
    "host": HostLowering,
    "native": NativeLowering,
    "classic": ClassicLowering,
}
TARGETS = {
    target.name: target
    for target in (
        Target("host", "host", ("host",)),
        Target("rtx-sm86", "tensorrt-rtx", ("native", "classic"), Compiler("tensorrt-rtx", "SM86")),
    )
}


def find_target(name: str) -> Target:
    """The target of that name. Raises BuildError."""
    if name not in TARGETS:
        raise BuildError(f"there is no target {name!r}; there are {', '.join(TARGETS)}")
    return TARGETS[name]


def lowering_for(target: Target, name: str | None = None) -> Lowering:
    """The lowering of that name, or the target's default. Raises BuildError."""
    wanted = name or target.lowerings[0]
    if wanted not in target.lowerings:
        raise BuildError(
            f"target {target.name} has no lowering {wanted!r}; it has {', '.join(target.lowerings)}"
        )
    return LOWERINGS[wanted]()
