import numpy as np
import onnx
import onnxruntime as ort
import pytest

from builders.graph import ALIGNMENT, EXTERNAL_FROM, Graph, data_file
from edgevlm.bundle import TensorSpec

X = TensorSpec("x", "float32", ("rows", 512), "x")
Y = TensorSpec("y", "float32", ("rows", 512), "y")


def graph(path, opset=21, ir_version=10):
    return Graph(path, opset, ir_version)


def external(tensor):
    return {entry.key: entry.value for entry in tensor.external_data}


def test_weights_lie_page_aligned_beside_the_graph_and_small_ones_within(tmp_path):
    path = tmp_path / "llm.onnx"
    big = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    small = np.arange(512, dtype=np.float32)
    with graph(path) as g:
        g.input(X)
        g.output(Y)
        y = g.node("MatMul", ["x", g.weight("first", big)], "/first")
        y = g.node("MatMul", [y, g.weight("second", big)], "/second")
        g.node("Add", [y, g.weight("bias", small)], "/bias", output="y")
        g.save()
    model = onnx.load(path, load_external_data=False)
    first, second, bias = model.graph.initializer
    assert path.stat().st_size < EXTERNAL_FROM
    assert external(first) == {
        "location": "llm.onnx.data",
        "offset": "0",
        "length": str(big.nbytes),
    }
    assert int(external(second)["offset"]) % ALIGNMENT == 0
    assert not bias.external_data
    assert [n.name for n in model.graph.node] == ["/first", "/second", "/bias"]
    assert model.graph.node[0].output[0] == "/first/output_0"
    x = np.ones((2, 512), np.float32)
    (found,) = ort.InferenceSession(str(path)).run(None, {"x": x})
    np.testing.assert_allclose(found, x @ big @ big + small, rtol=1e-3, atol=1e-2)


def test_equal_constants_are_stored_once_and_other_dtypes_apart(tmp_path):
    with graph(tmp_path / "a.onnx") as g:
        zero = g.constant(np.array([0], np.int64))
        assert g.constant(np.array([0], np.int64)) == zero
        assert g.constant(np.array([0], np.int32)) != zero
        assert g.constant(np.array(0, np.int64)) != zero


def test_int4_nibbles_become_twos_complement(tmp_path):
    path = tmp_path / "a.onnx"
    codes = np.array([[0x80, 0xF1]], np.uint8)  # q + 8 = 0, 8, 1, 15
    with graph(path) as g:
        g.output(TensorSpec("y", "float32", (1, 4), "y"))
        w = g.int4("w", codes, [1, 4])
        scale = g.weight("scale", np.ones((1, 1), np.float32), packed=True)
        g.node("DequantizeLinear", [w, scale], "/dq", output="y", axis=1, block_size=4)
        g.save()
        assert g.weight_bytes().packed_int4 == 2 + 4
    (found,) = ort.InferenceSession(str(path)).run(None, {})
    assert found.tolist() == [[-8, 0, -7, 7]]


def test_int4_refuses_a_wrong_count(tmp_path):
    with graph(tmp_path / "a.onnx") as g, pytest.raises(ValueError, match="do not hold"):
        g.int4("w", np.zeros((1, 3), np.uint8), [1, 4])


def test_bytes_and_reasons_are_kept_for_the_report(tmp_path):
    with graph(tmp_path / "a.onnx") as g:
        g.weight("codes", np.zeros(7, np.uint8), packed=True)
        g.weight("norm", np.zeros(4, np.float16))
        g.keep("odd", "input size 7 is odd")
        weights = g.weight_bytes()
    assert (weights.packed_int4, weights.floats) == (7, 8)
    assert [(k.name, k.reason) for k in weights.kept_16bit] == [("odd", "input size 7 is odd")]


@pytest.mark.parametrize("what", ["node", "tensor"])
def test_a_name_is_used_once(tmp_path, what):
    with graph(tmp_path / "a.onnx") as g, pytest.raises(ValueError, match=f"two {what}s"):
        for _ in range(2):
            if what == "node":
                g.node("Identity", ["x"], "/same")
            else:
                g.weight("same", np.zeros(1, np.float32))


def test_an_output_that_no_node_makes_is_refused(tmp_path):
    with graph(tmp_path / "a.onnx") as g, pytest.raises(ValueError, match="graph output y"):
        g.output(Y)
        g.save()


def test_a_graph_that_is_not_saved_leaves_no_data_file(tmp_path):
    path = tmp_path / "a.onnx"
    with pytest.raises(RuntimeError), graph(path) as g:
        g.weight("w", np.zeros(1 << 16, np.float32))
        raise RuntimeError
    assert not data_file(path).exists()


def test_once_appends_once(tmp_path):
    with graph(tmp_path / "a.onnx") as g:
        made = [g.once("mask", lambda: g.node("Identity", ["x"], "/mask")) for _ in range(2)]
    assert made[0] == made[1]
