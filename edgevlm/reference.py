"""reference.npz: the fixed prompts of a bundle and the logits that its checkpoint gives them.

Knows the file, no executor. Full logits where the vocabulary is small; else every nth, which
estimates the same cosine. Nothing in it is unpickled.
"""

import dataclasses
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgevlm.bundle import REFERENCE, Bundle
from edgevlm.errors import BundleError
from edgevlm.positions import Grid

VERSION = 1
SAMPLED = 4096  # logits of each position, spread over the vocabulary
TOP = 8  # first choices of each position
FP16_MAX = 65504.0
EMPTY_F32 = np.empty((0, 0), np.float32)


@dataclass(frozen=True, eq=False)
class Case:
    """One prompt. From `answer` on all is empty until a reference was made.

    `logits` are those of the checkpoint; `rounded` those of what its INT4 codes stand for, still in
    float32; the first choices are those of `rounded` where it is there.

    | field                | shape              |                                               |
    |----------------------|--------------------|-----------------------------------------------|
    | ids, positions       | [n], [1 or 3, n]   | int64                                         |
    | picture              | PNG, already resized, as bytes; its features begin at `row`        |
    | answer               | [steps]            | int64, given to decode one after the other    |
    | logits               | [1 + steps, sample]| float16                                       |
    | top_ids, top_values  | [1 + steps, TOP]   | int32, float32, the likeliest first           |
    | rounded              | [1 + steps, sample]| float16; None where weights are not INT4      |
    | features             | [3, hidden]        | float16: first, middle and last image row     |
    """

    name: str
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    steps: int
    picture: bytes | None = None
    grid: Grid = (0, 0, 0)
    row: int = 0
    tokens: int = 0
    answer: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    logits: NDArray[Any] = dataclasses.field(default_factory=lambda: EMPTY_F32)
    top_ids: NDArray[Any] = dataclasses.field(default_factory=lambda: EMPTY_F32)
    top_values: NDArray[Any] = dataclasses.field(default_factory=lambda: EMPTY_F32)
    rounded: NDArray[Any] | None = None
    features: NDArray[Any] | None = None

    def image(self) -> Image.Image:
        """The picture, as the tower takes it."""
        assert self.picture is not None
        return Image.open(io.BytesIO(self.picture)).convert("RGB")

    def sampled_rows(self) -> list[int]:
        """Which of the picture's rows are kept: first, middle, last."""
        return [0, self.tokens // 2, self.tokens - 1]

    def answered(
        self, logits: NDArray[np.float32], features: Any, sample: NDArray[np.int32]
    ) -> "Case":
        """The case with what was found as what is right."""
        ids, values = _first_choices(logits)
        return dataclasses.replace(
            self,
            answer=ids[:-1, 0].astype(np.int64),
            logits=_as_half(logits[:, sample]),
            top_ids=ids,
            top_values=values,
            features=None if features is None else np.asarray(features, np.float16),
        )

    def with_rounded(self, logits: NDArray[np.float32], sample: NDArray[np.int32]) -> "Case":
        """The case with what INT4 weights give as what is right."""
        ids, values = _first_choices(logits)
        rounded = _as_half(logits[:, sample])
        return dataclasses.replace(self, rounded=rounded, top_ids=ids, top_values=values)

    @property
    def expected(self) -> NDArray[Any]:
        """The logits that the bundle should give."""
        return self.logits if self.rounded is None else self.rounded


def _first_choices(logits: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    values = np.take_along_axis(logits, order, 1).astype(np.float32)
    return order.astype(np.int32), values


def _as_half(logits: NDArray[np.float32]) -> NDArray[np.float16]:
    return np.clip(logits, -FP16_MAX, FP16_MAX).astype(np.float16)


@dataclass(frozen=True, eq=False)
class Reference:
    """`made`: how the logits came about; None where there are none, and `reason` says why."""

    cases: tuple[Case, ...]
    sample: NDArray[np.int32]
    made: str | None = None
    reason: str | None = None


ARRAYS = ("ids", "positions", "answer", "logits", "top_ids", "top_values", "rounded", "features")


def sampled_ids(vocab_size: int) -> NDArray[np.int32]:
    """Which logits are kept."""
    step = max(1, -(-vocab_size // SAMPLED))
    return np.arange(0, vocab_size, step, dtype=np.int32)


def write_reference(path: Path, reference: Reference) -> None:
    """Write reference.npz."""
    facts: dict[str, Any] = {
        "version": VERSION,
        "made": reference.made,
        "reason": reference.reason,
        "cases": [],
    }
    arrays: dict[str, NDArray[Any]] = {"sample": reference.sample}
    for i, case in enumerate(reference.cases):
        keys = ("name", "steps", "grid", "row", "tokens")
        facts["cases"].append({key: getattr(case, key) for key in keys})
        for name in ARRAYS:
            if (value := getattr(case, name)) is not None:
                arrays[f"{name}.{i}"] = value
        if case.picture is not None:
            arrays[f"picture.{i}"] = np.frombuffer(case.picture, np.uint8)
    arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read_reference(bundle: Bundle) -> Reference:
    """The bundle's reference.npz. Raises BundleError."""
    path = bundle.file(REFERENCE)
    if REFERENCE not in bundle.manifest.files:
        raise BundleError(
            f"{bundle.path} has no {REFERENCE}: an earlier edgevlm built it; build it again"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        facts = json.loads(arrays["facts"].tobytes())
        if facts["version"] != VERSION:
            raise BundleError(
                f"{path} has format {facts['version']}; this edgevlm reads {VERSION}; "
                "build the bundle again"
            )
        cases = tuple(_case(arrays, i, entry) for i, entry in enumerate(facts["cases"]))
        return Reference(cases, arrays["sample"], facts["made"], facts["reason"])
    except (OSError, ValueError, KeyError) as error:
        raise BundleError(f"{path} cannot be read: {error}; build the bundle again") from None


def _case(arrays: dict[str, NDArray[Any]], i: int, entry: dict[str, Any]) -> Case:
    found: dict[str, Any] = {
        name: arrays[f"{name}.{i}"] for name in ARRAYS if f"{name}.{i}" in arrays
    }
    picture = arrays[f"picture.{i}"].tobytes() if f"picture.{i}" in arrays else None
    a, b, c = entry["grid"]
    return Case(**{**entry, "grid": (a, b, c)}, picture=picture, **found)
