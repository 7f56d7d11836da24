"""The built directory: its files, its manifest, and the check that it is whole.

All file names are here and nowhere else. It knows no executor and opens no graph.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgevlm.config import Limits, ModelConfig, from_dict, to_dict
from edgevlm.errors import BundleError
from edgevlm.memory_plan import DType, MemoryPlan

FORMAT_VERSION = 1
MANIFEST = "bundle.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
EMBEDDING_TABLE = "embed_tokens.bin"
VISION_GRAPH = "vision.onnx"
LLM_GRAPH = "llm.onnx"
REFERENCE = "reference.npz"
TIMING_CACHE = "timing.cache"

IMAGE_ROW = "image_row"  # the dim that says where a picture's rows begin

PhaseName = Literal["vision", "prefill", "decode"]
PHASES: tuple[PhaseName, ...] = ("vision", "prefill", "decode")


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph.

    `shape` holds sizes and dim names that `Executor.run` is given. The tensor is bound into
    `placement`, beginning at the row (index of the first axis) that the dim `start` names.
    """

    name: str
    dtype: DType
    shape: tuple[int | str, ...]
    placement: str
    start: str | None = None


@dataclass(frozen=True)
class StageSpec:
    """One graph or engine file of a phase; stages of a phase run in order."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class FileRecord:
    """What a file must look like to be the one that was built."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class BuiltOn:
    """What compiled the engines, which run on nothing else. None: not known."""

    tensorrt: str | None = None
    compute_capability: str | None = None
    l4t: str | None = None


@dataclass(frozen=True)
class PendingStage:
    """A graph that waits for its compiler. `profiles`: by name, then dim: (min, opt, max)."""

    part: Literal["llm", "vision"]
    graph: str
    engine: str
    bytes: int  # of weights
    profiles: dict[str, dict[str, tuple[int, int, int]]]


@dataclass(frozen=True)
class Pending:
    """What `edgevlm compile` has to do, and with which compiler."""

    compiler: str
    compute_capability: str | None
    workspace: int | None
    stages: tuple[PendingStage, ...]


@dataclass(frozen=True)
class Manifest:
    """bundle.json. `build` is the report: figures for people, never read by the runtime.

    `pending`: the bundle is prepared only, and cannot run before `edgevlm compile`.
    """

    version: int
    edgevlm: str
    target: str
    executor: str
    lowering: str
    weights: str
    model: ModelConfig
    special_tokens: dict[str, str]  # the chat template's variables: bos_token, eos_token, ...
    phases: dict[str, tuple[StageSpec, ...]]
    plan: MemoryPlan
    build: dict[str, Any]
    files: dict[str, FileRecord]
    built_on: BuiltOn | None = None
    pending: Pending | None = None

    @property
    def feature_placements(self) -> tuple[str, ...]:
        """Where a picture's features go, row for row: "inputs_embeds", and "deepstack.N"."""
        specs = (spec for stage in self.phases.get("vision", ()) for spec in stage.outputs)
        return tuple(spec.placement for spec in specs if spec.start == IMAGE_ROW)

    @property
    def limits(self) -> Limits:
        """What the bundle was built for."""
        return self.plan.limits


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: a directory and its manifest."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Absolute path of one of the bundle's files."""
        return self.path / name


def data_file(graph: Path) -> Path:
    """Where the weights of a graph lie: beside it, named after it."""
    return graph.with_name(graph.name + ".data")


def embedding_dtype(weights: str) -> DType:
    """What embed_tokens.bin holds, by the manifest's `weights`: fp32 means fp32 throughout."""
    return "float32" if weights == "fp32" else "float16"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write bundle.json."""
    text = json.dumps(to_dict(manifest), indent=1)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")


def record(path: Path) -> FileRecord:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else None
        if digest is None:  # Python 3.10
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    return FileRecord(path.stat().st_size, digest.hexdigest())


def open_bundle(path: str | Path, *, check: bool = True) -> Bundle:
    """Read the manifest and prove that every file is the one that was built.

    With `check=False` only sizes are compared. Raises BundleError.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    _check_sizes(directory, manifest)
    if check:
        with ThreadPoolExecutor(2) as threads:  # hashlib lets go of the GIL
            names = sorted(manifest.files, key=lambda n: -manifest.files[n].bytes)
            records = threads.map(record, [directory / name for name in names])
            for name, found in zip(names, records, strict=True):
                if found != manifest.files[name]:
                    raise BundleError(
                        f"{directory / name} is damaged: its SHA-256 is {found.sha256[:12]}..., "
                        f"the build wrote {manifest.files[name].sha256[:12]}...; "
                        "copy or build it again"
                    )
    return Bundle(directory, manifest)


def read_manifest(directory: Path) -> Manifest:
    """Parse bundle.json. Raises BundleError that says what is wrong and what to do."""
    path = directory / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = "no such directory" if not directory.exists() else f"it has no {MANIFEST}"
        raise BundleError(
            f"{directory} is not a bundle: {what}; make one with `edgevlm build CHECKPOINT OUT`"
        ) from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}; build the bundle again") from None
    version = data.get("version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{directory} has bundle format {version!r}; this edgevlm reads {FORMAT_VERSION}; "
            "build the bundle again with this version"
        )
    try:
        return from_dict(Manifest, data)
    except ValueError as error:
        raise BundleError(f"{path} is damaged: {error}; build the bundle again") from None


def _check_sizes(directory: Path, manifest: Manifest) -> None:
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise BundleError(f"{path} is missing; copy or build the bundle again")
        if (size := path.stat().st_size) != expected.bytes:
            raise BundleError(
                f"{path} has {size:,} bytes, the build wrote {expected.bytes:,}; "
                "copy or build the bundle again"
            )
