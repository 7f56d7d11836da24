"""How much memory a machine has and can give, read from /proc and /sys.

MemAvailable is what counts, never MemFree: a board that has just copied a model has nearly no free
memory, and nearly all of it available.
"""

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from edgevlm.filesystem import FileSystem

MIB = 1 << 20
MIN_HEADROOM = 600 * MIB
UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 where there is no limit
MAX_ORDER = 20
CGROUP_V2 = ("memory.max", "memory.current")
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@dataclass(frozen=True)
class Memory:
    """Bytes; None where the machine does not say. `zram` and `disk_swap` split the swap."""

    total: int | None = None
    available: int | None = None
    free: int | None = None
    swap_total: int | None = None
    swap_free: int | None = None
    zram: int | None = None
    disk_swap: int | None = None
    cma_total: int | None = None
    cma_free: int | None = None
    nvmap_used: int | None = None
    largest_free_block: int | None = None
    largest_free_blocks: int | None = None  # how many of that size
    cgroup_limit: int | None = None
    cgroup_available: int | None = None

    @property
    def obtainable(self) -> int | None:
        """What can be had without swapping: page cache counts, and a cgroup's limit holds."""
        if self.available is None or self.cgroup_available is None:
            return self.available
        return min(self.available, self.cgroup_available)


def read_memory(files: FileSystem) -> Memory:
    """Everything that can be read."""
    sizes = _meminfo(files)
    zram, disk = _swaps(files)
    block, blocks = _largest_free_block(files)
    limit, in_cgroup = _cgroup(files)
    return Memory(
        total=sizes.get("MemTotal"),
        available=sizes.get("MemAvailable"),
        free=sizes.get("MemFree"),
        swap_total=sizes.get("SwapTotal"),
        swap_free=sizes.get("SwapFree"),
        zram=zram,
        disk_swap=disk,
        cma_total=sizes.get("CmaTotal"),
        cma_free=sizes.get("CmaFree"),
        nvmap_used=sizes.get("NvMapMemUsed"),
        largest_free_block=block,
        largest_free_blocks=blocks,
        cgroup_limit=limit,
        cgroup_available=in_cgroup,
    )


def headroom(available: int) -> int:
    """What is left alone: other programs grow, and running out stops a board, not only us."""
    return max(available // 10, MIN_HEADROOM)


def mib(nbytes: int) -> str:
    """Bytes as tegrastats counts them: "7,620 MiB"."""
    return f"{nbytes / MIB:,.0f} MiB"


def _meminfo(files: FileSystem) -> dict[str, int]:
    text = files.text("proc/meminfo") or ""
    found = re.findall(r"^(\w+):\s*([0-9]{1,15}) kB\s*$", text, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def _swaps(files: FileSystem) -> tuple[int | None, int | None]:
    """(bytes of zram, bytes of other swap)."""
    text = files.text("proc/swaps")
    if text is None or not text.startswith("Filename"):
        return None, None
    zram = disk = 0
    for line in text.splitlines()[1:]:
        match = re.match(r"(\S+)\s+\S+\s+([0-9]{1,15})\s", line)
        if match is None:
            continue
        size = int(match[2]) * 1024
        if PurePosixPath(match[1]).name.startswith("zram"):
            zram += size
        else:
            disk += size
    return zram, disk


def _largest_free_block(files: FileSystem) -> tuple[int | None, int | None]:
    """(bytes, how many): tegrastats prints the same as "lfb 15x4MB"."""
    page = os.sysconf("SC_PAGE_SIZE") if files.live else 4096
    counts: dict[int, int] = {}
    for line in (files.text("proc/buddyinfo") or "").splitlines():
        match = re.match(r"Node\s+[0-9]+, zone\s+\S+\s+([0-9 ]+)$", line)
        if match is not None:
            for order, count in enumerate(match[1].split()[:MAX_ORDER]):
                counts[order] = counts.get(order, 0) + int(count[:15])
    for order in sorted(counts, reverse=True):
        if counts[order]:
            return page << order, counts[order]
    return (0, 0) if counts else (None, None)


def _cgroup(files: FileSystem) -> tuple[int | None, int | None]:
    """(limit, what is left of it) of the tightest control group above this process."""
    text = files.text("proc/self/cgroup") or ""
    tightest: tuple[int | None, int | None] = (None, None)
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, names = "sys/fs/cgroup", CGROUP_V2
        elif "memory" in controllers.split(","):
            base, names = "sys/fs/cgroup/memory", CGROUP_V1
        else:
            continue
        for group in _ancestors(path):
            limit, left = _limit(files, f"{base}/{group}", *names)
            if left is not None and (tightest[1] is None or left < tightest[1]):
                tightest = limit, left
    return tightest


def _ancestors(path: str) -> list[str]:
    """A control group's path and those above it; in a container only the last may be visible."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # seen from another namespace: only what is mounted at the top is ours
        return [""]
    return ["/".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _limit(
    files: FileSystem, group: str, limit_name: str, usage_name: str
) -> tuple[int | None, int | None]:
    limit, usage = files.number(f"{group}/{limit_name}"), files.number(f"{group}/{usage_name}")
    if limit is None or limit >= UNLIMITED:  # "max" is no number
        return None, None
    # Usage counts the page cache, which the kernel takes back before it kills anybody.
    cache = 0
    stat = files.text(f"{group}/memory.stat") or ""
    for name in ("inactive_file", "active_file"):
        # Version 1 has the group alone as well as the total with those below it.
        values = dict(re.findall(rf"^(total_)?{name} ([0-9]{{1,18}})$", stat, re.MULTILINE))
        cache += int(values.get("total_") or values.get("") or 0)
    return limit, max(0, limit - max(0, (usage or 0) - cache))
