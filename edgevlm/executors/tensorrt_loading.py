"""TensorRT's runtime: engine files become engines, whose memory the arena takes.

It knows where files are and how they are read; not what the engines are for.
"""

from typing import Any

from edgevlm.bundle import Bundle, StageSpec
from edgevlm.errors import ExecutorError
from edgevlm.executors.arena import Arena
from edgevlm.executors.loading import EngineReader, Progress
from edgevlm.executors.staging import Staging
from edgevlm.executors.tensorrt_api import Api
from edgevlm.executors.tensorrt_callbacks import (
    Owner,
    Words,
    make_allocator,
    make_logger,
    make_reader,
    read_bytes,
)
from edgevlm.executors.tensorrt_stage import Engine


class EngineLoader:
    """Owns the runtime, which must outlive its engines."""

    def __init__(self, api: Api, arena: Arena, staging: Staging) -> None:
        self.owner = Owner()
        self._api, self._staging = api, staging
        self._words = Words()
        self._logger = make_logger(api.module, self._words)
        self.allocator = make_allocator(api.module, arena, self.owner)
        self._runtime: Any = api.module.Runtime(self._logger)
        if self._runtime is None:
            raise ExecutorError(f"TensorRT does not start: {self._words.take()}")
        self._runtime.gpu_allocator = self.allocator

    def load(self, bundle: Bundle, stage: StageSpec, progress: Progress | None = None) -> Engine:
        """Read and deserialize one engine. Raises ExecutorError, BundleError."""
        path = bundle.file(stage.file)
        reader = EngineReader(
            path, bundle.manifest.files[stage.file].bytes, self._staging, progress
        )
        self.owner.refusal = None
        try:
            source = make_reader(self._api, reader)
            if source is None:
                source = read_bytes(path)
            engine = self._runtime.deserialize_cuda_engine(source)
        finally:
            reader.close()
        if engine is None:
            cause = reader.error or self.owner.refusal
            if cause is not None:
                raise cause
            raise ExecutorError(
                f"TensorRT cannot read {path}: {self._words.take()}; "
                "build the bundle again on this machine"
            )
        return Engine(self._api, self._words, path, engine, stage)

    def close(self) -> None:
        """Let go of the runtime."""
        self._runtime = None
