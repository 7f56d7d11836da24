import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from builders.shards import open_shards, read_float32, read_header, same_bytes
from edgevlm.errors import UnsupportedCheckpoint


def refused_directory(path, *words):
    with pytest.raises(UnsupportedCheckpoint) as caught:
        open_shards(path)
    message = str(caught.value)
    assert all(word in message for word in words), message


def refused(path, *words):
    with pytest.raises(UnsupportedCheckpoint) as caught:
        read_header(path)
    message = str(caught.value)
    assert all(word in message for word in (path.name, *words)), message
    assert "\n" not in message


def test_header_says_where_each_tensor_lies(tmp_path):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((), np.float16)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    entries = open_shards(tmp_path)
    assert {n: (e.dtype, e.shape, e.nbytes) for n, e in entries.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("F16", (), 2),
    }
    for name, expected in tensors.items():
        assert np.array_equal(read_float32(entries[name], name), expected)
        if expected.ndim and len(expected) > 1:
            assert np.array_equal(read_float32(entries[name], name, 1, len(expected)), expected[1:])


def test_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("builders.shards.BAND", 8)
    a = np.arange(6, dtype=np.float32)
    c = a.copy()
    c[5] = 0
    tensors = {"a": a, "b": a.copy(), "c": c, "half": a.astype(np.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    entries = open_shards(tmp_path)
    assert same_bytes(entries["a"], entries["b"])
    assert not same_bytes(entries["a"], entries["c"])
    assert not same_bytes(entries["a"], entries["half"])


@pytest.mark.parametrize(
    "item",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 16]},
        {"dtype": "F4", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
        {"dtype": "F32", "data_offsets": [0, 16]},
        ["F32"],
    ],
)
def test_header_that_is_wrong(tmp_path, item):
    header = json.dumps({"a": item}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(data)
    refused(tmp_path / "model.safetensors")


@pytest.mark.parametrize("header", [b"not json", b"[1, 2]", b"\xff\xfe"])
def test_header_that_is_not_an_object(tmp_path, header):
    data = struct.pack("<Q", len(header)) + header
    (tmp_path / "model.safetensors").write_bytes(data)
    refused(tmp_path / "model.safetensors", "header")


def test_one_file_of_any_name(tmp_path):
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "weights.safetensors")
    assert set(open_shards(tmp_path)) == {"a"}


def test_shards_without_index(tmp_path):
    for name in ("one", "two"):
        save_file({name: np.ones(3, np.float32)}, tmp_path / f"{name}.safetensors")
    refused_directory(tmp_path, "2 safetensors files", "index.json")


def test_only_bin(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    refused_directory(tmp_path, "pytorch_model.bin", "save_pretrained")


def test_no_weights(tmp_path):
    refused_directory(tmp_path, "no weights", "model.safetensors")


def test_tensor_that_the_index_does_not_name_counts(tmp_path):
    save_file(
        {"a": np.ones(3, np.float32), "b": np.zeros(3, np.float32)}, tmp_path / "x.safetensors"
    )
    index = {"weight_map": {"a": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(open_shards(tmp_path)) == {"a", "b"}
