"""Bands of rows: equal to the whole tensor, and no more of it in memory than a band."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from builders.graph import Graph
from builders.presets import find_model
from builders.quantize import quantize
from builders.rows import BAND_BYTES, Rows, as_rows, mapped, rows_of
from builders.weights import BLOCK, RandomWeights

MODEL = find_model("qwen2.5-0.5b").config
EMBEDDING = "model.embed_tokens.weight"


class Few:
    """Two matrices, and which rows were asked for."""

    def __init__(self) -> None:
        values = np.arange(40, dtype=np.float32).reshape(10, 4)
        self.matrices = {"q": values[:6], "k": values[6:], "wide": np.zeros((2, 5), np.float32)}
        self.asked: list[tuple[str, int, int]] = []

    def shape(self, name: str) -> tuple[int, ...]:
        return self.matrices[name].shape

    def rows(self, name: str, begin: int, end: int) -> np.ndarray:
        self.asked.append((name, begin, end))
        return self.matrices[name][begin:end]


def test_matrices_one_above_the_other_read_only_the_rows_that_are_asked_for() -> None:
    few = Few()
    both = rows_of(few, "q", "k")
    whole = np.concatenate([few.matrices["q"], few.matrices["k"]])
    assert both.shape == (10, 4)
    for begin in range(10):
        for end in range(begin, 11):
            assert np.array_equal(both[begin:end], whole[begin:end])
    few.asked.clear()
    assert np.array_equal(both[4:8], whole[4:8])
    assert few.asked == [("q", 4, 6), ("k", 0, 2)]
    assert np.array_equal(mapped(both, lambda band: band + 1)[:], whole + 1)


def test_bands_cover_every_row_once_and_none_is_larger_than_it_may_be() -> None:
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    bands = list(as_rows(values).bands(3 * 16))
    assert [begin for begin, _ in bands] == [0, 3, 6, 9]
    assert np.array_equal(np.concatenate([band for _, band in bands]), values)
    assert [len(band) for _, band in as_rows(values).bands(1)] == [1] * 10


def test_what_makes_no_matrix_is_said() -> None:
    with pytest.raises(ValueError, match="make no matrix"):
        rows_of(Few(), "q", "wide")
    with pytest.raises(ValueError, match="steps of 2"):
        as_rows(np.zeros((4, 4), np.float32))[::2]


def test_random_rows_are_those_of_the_whole_tensor() -> None:
    source = RandomWeights(MODEL, 3)
    name = "model.layers.0.mlp.up_proj.weight"
    whole = source.tensor(name)
    assert whole.size > BLOCK, "the band below begins after the values repeat"
    for begin, end in ((0, 3), (4700, 4864), (17, 17)):
        assert np.array_equal(RandomWeights(MODEL, 3).rows(name, begin, end), whole[begin:end])


def test_a_large_matrix_is_written_transposed_from_bands(tmp_path) -> None:
    asked: list[int] = []
    values = np.random.default_rng(0).standard_normal((5000, 900)).astype(np.float32)

    def read(begin: int, end: int) -> np.ndarray:
        asked.append(end - begin)
        return values[begin:end]

    with Graph(tmp_path / "g.onnx", 21, 10) as g:
        for dtype in ("float32", "float16"):
            g.transposed(f"{dtype}/large", Rows((5000, 900), read), dtype)
            g.weight(f"{dtype}/next", np.full(40_000, 7, np.float32))
        g.transposed("small", as_rows(values[:3]), "float32")
        assert g.float_bytes == 5000 * 900 * (4 + 2) + 2 * 160_000 + 3 * 900 * 4
        g.save()
    assert max(asked) * 900 * 4 <= BAND_BYTES and sum(asked) == 2 * 5000
    tensors = {
        t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "g.onnx").graph.initializer
    }
    assert np.array_equal(tensors["float32/large"], values.T)
    assert np.array_equal(tensors["float16/large"], values.T.astype(np.float16))
    assert np.array_equal(tensors["small"], values[:3].T)
    assert all((tensors[f"{dtype}/next"] == 7).all() for dtype in ("float32", "float16"))


def test_a_matrix_quantises_to_the_same_codes_read_in_bands() -> None:
    values = np.random.default_rng(1).standard_normal((300, 1024)).astype(np.float32)
    whole, banded = quantize(values, 128), quantize(as_rows(values), 128)
    assert np.array_equal(whole.codes, banded.codes)
    assert np.array_equal(whole.scales, banded.scales)
