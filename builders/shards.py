"""Safetensors files: headers checked against the files' sizes, tensors read by name in bands.

Read here and not through the safetensors package: its numpy door needs ml_dtypes for bf16, its
errors name no tensor, and its mmap turns a file that shrinks under us into SIGBUS where a read
gives an error; the pages that it touches would also count as the builder's own memory.
Knows neither families nor canonical names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UnsupportedCheckpoint

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "download it again"
BAND = 1 << 22  # elements converted at a time: 16 MiB of float32
MAX_HEADER = 100_000_000  # the format's own limit

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
READABLE: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `start` counts from the beginning of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def open_shards(directory: Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint by the name it has in its files; all headers are checked."""
    weight_map = _weight_map(directory)
    entries: dict[str, Entry] = {}
    for file in sorted(set(weight_map.values())):
        header = read_header(directory / file)
        absent = [n for n, f in weight_map.items() if f == file and n and n not in header]
        if absent:
            raise UnsupportedCheckpoint(
                f"the index says that {file} holds {absent[0]!r}, and it does not"
                f"{_more(absent)}; index and shards are of different versions, {AGAIN}"
            )
        # a tensor the index does not name still counts, as in transformers
        entries.update((n, e) for n, e in header.items() if weight_map.get(n, file) == file)
    return entries


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> file name. A single file has no index: its name stands under ""."""
    if (directory / SINGLE).is_file():
        return {"": SINGLE}
    indexes = sorted(p.name for p in directory.glob("*.safetensors.index.json"))
    if indexes:
        return _read_index(directory, INDEX if INDEX in indexes else indexes[0])
    files = sorted(p.name for p in directory.glob("*.safetensors"))
    if len(files) == 1:
        return {"": files[0]}
    if files:
        raise UnsupportedCheckpoint(
            f"{directory} has {len(files)} safetensors files and no {INDEX}; download that file too"
        )
    for suffix in ("bin", "pt", "pth", "gguf", "h5", "msgpack"):
        if found := sorted(directory.glob(f"*.{suffix}")):
            raise UnsupportedCheckpoint(
                f"{directory} has its weights as {found[0].name} and none as safetensors; convert "
                "it: transformers' from_pretrained(directory).save_pretrained(out) writes them"
            )
    raise UnsupportedCheckpoint(
        f"{directory} has no weights: neither {SINGLE} nor {INDEX}; download them"
    )


def _read_index(directory: Path, name: str) -> dict[str, str]:
    weight_map = read_json(directory / name).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise UnsupportedCheckpoint(f"{name} has no weight_map; {AGAIN}")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UnsupportedCheckpoint(
                f"{name} places {tensor!r} in {file!r}, not in a file beside it; {AGAIN}"
            )
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (directory / file).is_file()]:
        raise UnsupportedCheckpoint(
            f"{missing[0]} is missing{_more(missing)}: {name} names {len(files)} shards and "
            f"{len(files) - len(missing)} are in {directory}; download the rest"
        )
    return dict(weight_map)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; anything else is refused by the file's name."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UnsupportedCheckpoint(f"{path} cannot be read: {error.strerror}; {AGAIN}") from None
    except UnicodeDecodeError:
        raise UnsupportedCheckpoint(f"{path} is not UTF-8 text; {AGAIN}") from None
    _refuse_lfs(path, text[:64].encode())
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is empty" if not text.strip() else str(error)
        raise UnsupportedCheckpoint(f"{path} is not JSON ({why}); {AGAIN}") from None
    if not isinstance(data, dict):
        raise UnsupportedCheckpoint(
            f"{path} is a JSON {type(data).__name__}, not an object; {AGAIN}"
        )
    return data


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file; its header must be whole and agree with the file's length."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64)
            length = int.from_bytes(start[:8], "little")
            _refuse_lfs(path, start)
            if len(start) < 8:
                raise UnsupportedCheckpoint(f"{path} has {size} bytes and no header; {AGAIN}")
            if length > min(MAX_HEADER, size - 8):
                raise UnsupportedCheckpoint(
                    f"{path} has {size} bytes and announces a header of {length}: "
                    f"it is cut short or no safetensors file; {AGAIN}"
                )
            file.seek(8)
            raw = json.loads(file.read(length))
    except OSError as error:
        raise UnsupportedCheckpoint(f"{path} cannot be read: {error.strerror}; {AGAIN}") from None
    except (ValueError, RecursionError):
        raise UnsupportedCheckpoint(f"{path} has a header that is not JSON; {AGAIN}") from None
    try:
        entries = dict(_entries(path, raw, 8 + length))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UnsupportedCheckpoint(
            f"{path} has a header that is not safetensors'; {AGAIN}"
        ) from None
    end = max((e.start + e.nbytes for e in entries.values()), default=8 + length)
    if end != size:
        kind = "is cut short" if size < end else "has bytes that belong to no tensor"
        raise UnsupportedCheckpoint(
            f"{path} {kind}: {size} bytes, and its header describes {end}; {AGAIN}"
        )
    return entries


def _entries(path: Path, raw: dict[str, Any], base: int) -> Iterator[tuple[str, Entry]]:
    for name, item in raw.items():
        if name == "__metadata__":
            continue
        begin, end = (int(offset) for offset in item["data_offsets"])
        shape = tuple(int(size) for size in item["shape"])
        nbytes = math.prod(shape) * ITEM_BYTES.get(item["dtype"], 0)
        if begin < 0 or min(shape, default=0) < 0 or item["dtype"] not in ITEM_BYTES:
            raise UnsupportedCheckpoint(
                f"{path} stores {name!r} as {item['dtype']} {list(shape)} at {begin}, which is not "
                f"supported; use a bf16, fp16 or fp32 checkpoint"
            )
        if end - begin != nbytes:
            raise UnsupportedCheckpoint(
                f"{path} gives {name!r} {end - begin} bytes, and {item['dtype']} {list(shape)} "
                f"takes {nbytes}; {AGAIN}"
            )
        yield name, Entry(path, item["dtype"], shape, base + begin, nbytes)


def read_float32(
    entry: Entry, name: str, begin: int = 0, end: int | None = None
) -> NDArray[np.float32]:
    """A tensor, or rows `begin` to `end` of it, as float32.

    Converted in bands: the peak is the result and one band.
    """
    rows, row = entry.shape[:1], math.prod(entry.shape[1:])
    last = end if end is not None else (rows[0] if rows else 1)
    stored, first, count = READABLE[entry.dtype], begin * row, (last - begin) * row
    values = np.empty(count, np.float32)
    with entry.file.open("rb") as file:
        file.seek(entry.start + first * stored.itemsize)
        for at in range(0, count, BAND):
            out = values[at : at + BAND]
            band = np.fromfile(file, stored, len(out))
            if len(band) < len(out):
                raise UnsupportedCheckpoint(
                    f"{entry.file} ended while {name!r} was read: it became shorter; {AGAIN}"
                )
            if entry.dtype == "BF16":  # the upper half of a float32
                np.left_shift(band, 16, out=out.view(np.uint32), dtype=np.uint32)
            else:
                out[:] = band
            if not np.isfinite(out).all():
                where = at + int(np.flatnonzero(~np.isfinite(out))[0])
                raise UnsupportedCheckpoint(
                    f"{entry.file} has {values[where]} in {name!r} at element {first + where} of "
                    f"{math.prod(entry.shape)}; "
                    f"weights must be finite, {AGAIN} or use another checkpoint"
                )
    return values.reshape((last - begin, *entry.shape[1:]) if rows else ())


def same_bytes(left: Entry, right: Entry) -> bool:
    """Whether two tensors of one shape are stored with the same dtype and bytes."""
    if (left.dtype, left.nbytes) != (right.dtype, right.nbytes):
        return False
    with left.file.open("rb") as a, right.file.open("rb") as b:
        a.seek(left.start)
        b.seek(right.start)
        for at in range(0, left.nbytes, BAND):
            size = min(BAND, left.nbytes - at)
            if a.read(size) != b.read(size):
                return False
    return True


def _refuse_lfs(path: Path, start: bytes) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise UnsupportedCheckpoint(
            f"{path} is a Git-LFS pointer, not the file itself; run `git lfs pull` in its directory"
        )


def _more(items: list[str]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
