"""A host executor for models that are larger than what a builder may hold: stages come and go.

Only for making references: graphs are loaded when they are run, pools are taken page by page as
they are used, and ONNX Runtime's own memory has no bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort

from edgevlm.bundle import Bundle, PhaseName, data_file
from edgevlm.errors import ExecutorError
from edgevlm.executors.host import HostExecutor


class StreamedExecutor(HostExecutor):
    """Runs a phase stage by stage; sessions of at most `resident` bytes of weights are kept.

    Weights are mapped and used where they are, not packed: a stage takes its file's size, no more.
    """

    def __init__(self, bundle: Bundle, resident: int, threads: int | None = None) -> None:
        self._resident = resident
        self._kept: dict[str, int] = {}
        super().__init__(bundle, threads, touch=False)

    def run(self, phase: PhaseName, *, stage: int | None = None, **dims: int) -> None:
        """Run every stage of a phase, or one of them, loading those that are not there."""
        try:
            stages = self._phases[phase]
            for spec in stages if stage is None else (stages[stage],):
                self._load_stage(spec.file)
                session, binding = self._bind(spec, dims)
                session.run_with_iobinding(binding)
                del session, binding
        except Exception as error:  # ONNX Runtime raises classes of its own, one per status
            raise ExecutorError(f"ONNX Runtime failed in {phase} {dims}: {error}") from error

    def _load_stage(self, file: str) -> None:
        if file in self._sessions:
            return
        for name in [name for name in self._sessions if name not in self._kept]:
            del self._sessions[name]
        # The first that fit stay: stages come round in turn, so the oldest would be needed next.
        needed = data_file(self._paths[file]).stat().st_size
        if needed + sum(self._kept.values()) <= self._resident:
            self._kept[file] = needed
        path = str(self._paths[file])
        self._sessions[file] = ort.InferenceSession(
            path, self._options, providers=["CPUExecutionProvider"]
        )

    def _load_graphs(
        self, paths: dict[str, Path], threads: int, nbytes: int
    ) -> tuple[dict[str, Any], list[Any]]:
        self._paths = paths
        self._options = ort.SessionOptions()
        self._options.intra_op_num_threads = threads
        self._options.inter_op_num_threads = 1
        self._options.enable_cpu_mem_arena = False  # what a stage took goes back with it
        self._options.enable_mem_pattern = False
        self._options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._options.log_severity_level = 4  # what went wrong is in the exception
        self._options.add_session_config_entry("session.disable_prepacking", "1")
        return {}, []
