"""Progress of long work on stderr: bars in a terminal, one line a stage elsewhere."""

import sys
import time
from types import TracebackType

from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from edgevlm.commands.plan_report import human_bytes
from edgevlm.commands.terminal import terminal

MOST_PIECES = 1023  # a total above counts bytes


class BuildProgress:
    """Called with (stage, done, in all) as often as the builder likes.

    In bytes, or in pieces where there are few of them; a total of 1 begins, and ends.
    """

    def __init__(self) -> None:
        self._console = terminal(stderr=True)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._finished: set[str] = set()
        if sys.stderr.isatty():
            self._bars = Progress(
                TextColumn("{task.description:<24}"),
                BarColumn(),
                TextColumn("{task.fields[size]:>20}"),
                TimeElapsedColumn(),
                console=self._console,
            )

    def __enter__(self) -> "BuildProgress":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        start = self._started.setdefault(stage, time.perf_counter())
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, size="")
            size = f"{_amount(done, total)} of {_amount(total, total)}" if total > 1 else ""
            task = self._tasks[stage]
            self._bars.update(task, completed=done, total=max(total, 1), size=size)
        elif done >= total and stage not in self._finished:
            self._finished.add(stage)
            size = f"{_amount(total, total)} in " if total > 1 else ""
            self._console.print(f"{stage}: {size}{time.perf_counter() - start:.1f} s")


def _amount(number: int, total: int) -> str:
    return human_bytes(number) if total > MOST_PIECES else str(number)
