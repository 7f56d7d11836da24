"""An executor that answers what it was told to, one step for each permit; and a VLM on it.

The scheduler, the tokenizer and the chat template are real; only logits are made up.
"""

import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from edgevlm.bundle import CHAT_TEMPLATE, Bundle, open_bundle, record, write_manifest
from edgevlm.vlm import VLM

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)


class PacedExecutor:
    """`script`: the ids of every answer, the last one for ever. Paced: `step` lets it go on."""

    allocations_after_start = 0

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self._placements = {p.name: p for p in manifest.plan.placements}
        self._steps = [0] * manifest.limits.slots
        self._logits = np.zeros((manifest.limits.slots, manifest.model.text.vocab_size), np.float32)
        self._pace = threading.Semaphore(0)
        self.script: list[int] = [0]
        self.paced = False
        self.broken = False
        self.runs: list[str] = []
        self.closed = False

    def play(self, script: Sequence[int], paced: bool = False) -> None:
        """From now on."""
        self.script, self.paced, self.broken = list(script), paced, False
        self.runs.clear()

    def step(self, count: int = 1) -> None:
        """Let so many phases run."""
        self._pace.release(count)

    def free(self) -> None:
        """Let everything run."""
        self.paced = False
        self._pace.release()

    def staging(self, name: str, rows: int, start: int = 0) -> NDArray[Any]:
        """As `Executor`."""
        place = self._placements[name]
        return np.zeros((rows, *place.shape[1:]), place.dtype)

    def write(self, name: str, array: NDArray[Any], start: int = 0) -> None:
        """As `Executor`."""

    def copy(self, source: str, row: int, target: str, target_row: int, rows: int) -> None:
        """As `Executor`."""

    def run(self, phase: str, *, stage: int | None = None, **dims: int) -> None:
        """As `Executor`."""
        while self.paced and not self._pace.acquire(timeout=0.05):
            pass
        self.runs.append(phase)
        if phase == "vision":
            return
        for row in range(dims["batch_size"]):
            slot = dims["slot"] + row
            self._steps[slot] = 0 if phase == "prefill" else self._steps[slot] + 1
            token = self.script[min(self._steps[slot], len(self.script) - 1)]
            self._logits[row] = 0.0
            self._logits[row, token] = np.nan if self.broken else 20.0

    def read(self, name: str) -> NDArray[Any]:
        """As `Executor`."""
        return self._logits

    def close(self) -> None:
        """As `Executor`."""
        self.closed = True


def paced_vlm(bundle: Path, **options: Any) -> tuple[VLM, PacedExecutor]:
    """A VLM whose answers are scripted."""
    executor = PacedExecutor(open_bundle(bundle, check=False))
    with mock.patch("edgevlm.vlm.make_executor", lambda *_: executor):
        return VLM(bundle, check=False, **options), executor


def with_tools(bundle: Path, out: Path) -> Path:
    """A copy of a bundle whose chat template shows tools."""
    shutil.copytree(bundle, out)
    opened = open_bundle(out, check=False)
    template = out / CHAT_TEMPLATE
    template.write_text(TOOL_TEMPLATE + template.read_text(encoding="utf-8"), encoding="utf-8")
    files = {**opened.manifest.files, CHAT_TEMPLATE: record(template)}
    write_manifest(out, replace(opened.manifest, files=files))
    return out
