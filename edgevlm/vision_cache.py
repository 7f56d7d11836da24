"""Which pictures' features lie where in the planned vision cache; least recently used goes first.

Counts rows and knows digests; the rows themselves are the executor's, and who asks copies them.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class CachedRows:
    """Rows `start` to `start + length` of the cache hold one picture's features."""

    start: int
    length: int


class VisionCache:
    """`rows` rows, shared by pictures that each take a run of them."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.hits = self.misses = 0
        self._kept: OrderedDict[bytes, CachedRows] = OrderedDict()  # the oldest first

    @property
    def used(self) -> int:
        """Rows that hold features."""
        return sum(kept.length for kept in self._kept.values())

    def find(self, digest: bytes) -> CachedRows | None:
        """Where a picture's features are; it counts as used now."""
        kept = self._kept.get(digest)
        if kept is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(digest)
        return kept

    def add(self, digest: bytes, length: int) -> CachedRows | None:
        """A run of rows for a picture, which the caller fills before anything else is asked.

        None: it has more rows than the cache.
        """
        if length > self.rows:
            return None
        self._kept.pop(digest, None)
        while (start := self._gap(length)) is None:
            self._kept.popitem(last=False)
        kept = CachedRows(start, length)
        self._kept[digest] = kept
        return kept

    def clear(self) -> None:
        """Forget everything: what lies in the rows is not to be trusted."""
        self._kept.clear()

    def _gap(self, length: int) -> int | None:
        """The first run of free rows that is long enough."""
        end = 0
        for kept in sorted(self._kept.values(), key=lambda kept: kept.start):
            if kept.start - end >= length:
                return end
            end = kept.start + kept.length
        return end if self.rows - end >= length else None
