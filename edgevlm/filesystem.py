"""A machine's files under a root: `/`, or a tree that was copied from somewhere else.

Whatever is missing, unreadable or no plain file is None or empty: nothing here raises.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 32 << 20  # dpkg's status has a few MiB; anything larger is not what we look for


@dataclass(frozen=True)
class FileSystem:
    """`root` may be given as any directory; paths are written without a leading slash."""

    root: Path = Path("/")

    @property
    def live(self) -> bool:
        """Whether this is the machine that we run on."""
        return self.root == Path("/")

    def data(self, path: str) -> bytes | None:
        """The first MAX_BYTES of a plain file."""
        try:
            # Not blocking: a pipe in place of a file must not hang whoever asks.
            handle = os.open(self.root / path, os.O_RDONLY | os.O_NONBLOCK)
            with os.fdopen(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    return None
                return file.read(MAX_BYTES)
        except (OSError, ValueError):  # ValueError: a NUL in a path that came out of a file
            return None

    def text(self, path: str) -> str | None:
        """A file's text; bytes that are no UTF-8 become the replacement character."""
        data = self.data(path)
        return None if data is None else data.decode("utf-8", "replace")

    def strings(self, path: str) -> tuple[str, ...]:
        """A device tree property: strings that end in NUL."""
        text = self.text(path)
        return () if text is None else tuple(s for s in text.strip().split("\0") if s)

    def number(self, path: str) -> int | None:
        """A file with one whole number in it."""
        text = (self.text(path) or "").strip()
        return int(text) if len(text) <= 20 and text.isascii() and text.isdecimal() else None

    def names(self, path: str) -> tuple[str, ...]:
        """Names in a directory, sorted."""
        try:
            return tuple(sorted(os.listdir(self.root / path)))
        except (OSError, ValueError):
            return ()

    def link(self, path: str) -> str | None:
        """Where a symbolic link points, as it is written."""
        try:
            return os.readlink(self.root / path)
        except (OSError, ValueError):
            return None

    def has(self, path: str) -> bool:
        """Whether the path exists. A link that points nowhere counts: its target is elsewhere."""
        try:
            return os.path.lexists(self.root / path)
        except (OSError, ValueError):
            return False
