"""Writes one ONNX graph node by node; knows no model and no lowering.

Weights go to the external data file as they are added, large float ones in bands of rows. Node
names are paths, the output of node "/a/b" is "/a/b/output_0".
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from builders.rows import Rows
from edgevlm.bundle import TensorSpec
from edgevlm.bundle import data_file as data_file
from edgevlm.memory_plan import DType

ALIGNMENT = 4096  # of external tensors: a page, so that they can be mapped and read with O_DIRECT
EXTERNAL_FROM = 64 * 1024  # bytes; smaller tensors stay in the .onnx file
MICROSOFT = "com.microsoft"

ONNX_DTYPES: dict[str, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
}


@dataclass(frozen=True)
class Kept:
    """A weight that a policy would have quantised and did not."""

    name: str
    reason: str


@dataclass(frozen=True)
class WeightBytes:
    """What a graph's weights take. `packed_int4` counts codes and scales."""

    packed_int4: int
    floats: int
    kept_16bit: tuple[Kept, ...]


class Graph:
    """An ONNX graph under construction. Leaving `with` without `save()` removes its data file."""

    def __init__(self, path: Path, opset: int, ir_version: int) -> None:
        self.path = path
        self.packed_int4_bytes = 0
        self.float_bytes = 0
        self.kept: list[Kept] = []
        self._opset, self._ir_version = opset, ir_version
        self._nodes: list[Any] = []
        self._initializers: list[Any] = []
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._once: dict[str, str] = {}
        self._names: set[str] = set()
        self._domains: set[str] = set()
        self._data = data_file(path).open("wb")
        self._saved = False

    def __enter__(self) -> "Graph":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._data.close()
        if not self._saved:
            data_file(self.path).unlink(missing_ok=True)

    @staticmethod
    def onnx_dtype(dtype: DType) -> int:
        """ONNX's number of a dtype."""
        return ONNX_DTYPES[dtype]

    def input(self, spec: TensorSpec) -> str:
        """Declare a graph input."""
        info = helper.make_tensor_value_info(spec.name, ONNX_DTYPES[spec.dtype], list(spec.shape))
        self._inputs[spec.name] = info
        return spec.name

    def output(self, spec: TensorSpec) -> str:
        """Declare a graph output; some node must produce a value of that name."""
        info = helper.make_tensor_value_info(spec.name, ONNX_DTYPES[spec.dtype], list(spec.shape))
        self._outputs[spec.name] = info
        return spec.name

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        output: str | None = None,
        domain: str = "",
        **attrs: Any,
    ) -> str:
        """Append a node with one result, named `output` where that is given; "" skips an input."""
        return self.nodes(op, inputs, name, [output or f"{name}/output_0"], domain, **attrs)[0]

    def nodes(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        outputs: int | Sequence[str],
        domain: str = "",
        **attrs: Any,
    ) -> list[str]:
        """Append a node with several results: their number, or their names ("" skips one)."""
        if name in self._names:
            raise ValueError(f"two nodes are called {name}")
        self._names.add(name)
        self._domains.add(domain)
        if isinstance(outputs, int):
            outputs = [f"{name}/output_{i}" for i in range(outputs)]
        node = helper.make_node(op, list(inputs), list(outputs), name, domain=domain, **attrs)
        self._nodes.append(node)
        return list(outputs)

    def once(self, key: str, make: Callable[[], str]) -> str:
        """The value that `make` appended when this key was first asked for."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def constant(self, array: NDArray[Any]) -> str:
        """A small constant; equal ones are stored once."""
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._add(f"/constants/{len(self._constants)}", array)
        return self._constants[key]

    def weight(self, name: str, array: NDArray[Any], *, packed: bool = False) -> str:
        """A named initializer, counted as 16/32-bit, or as part of an INT4 weight if `packed`."""
        if packed:
            self.packed_int4_bytes += array.nbytes
        else:
            self.float_bytes += array.nbytes
        return self._add(name, array)

    def transposed(self, name: str, rows: Rows, dtype: DType) -> str:
        """A matrix [N, K] as an initializer [K, N], counted as 16/32-bit; read in bands."""
        n, k = rows.shape
        itemsize = np.dtype(dtype).itemsize
        self.float_bytes += n * k * itemsize
        if n * k * itemsize < EXTERNAL_FROM:
            return self._add(name, np.ascontiguousarray(rows[:].T, dtype))
        tensor = self._tensor(name, ONNX_DTYPES[dtype], (k, n))
        offset = self._reserve(tensor, n * k * itemsize)
        self._data.flush()
        for begin, band in rows.bands():
            columns = np.ascontiguousarray(band.T, dtype)
            for row, piece in enumerate(columns):
                _write_at(self._data, piece, offset + (row * n + begin) * itemsize)
        self._data.seek(offset + n * k * itemsize)
        self._initializers.append(tensor)
        return name

    def int4(self, name: str, codes: NDArray[np.uint8], shape: Sequence[int]) -> str:
        """An ONNX INT4 tensor from nibbles that hold q + 8, the low one first."""
        if codes.size * 2 != int(np.prod(shape)):
            raise ValueError(f"{name}: {codes.size} bytes do not hold {list(shape)} nibbles")
        self.packed_int4_bytes += codes.nbytes
        # q + 8 to two's complement: flip the top bit of each nibble.
        return self._add(name, codes ^ np.uint8(0x88), TensorProto.INT4, shape)

    def keep(self, name: str, reason: str) -> None:
        """Note that a weight was not quantised, and why."""
        self.kept.append(Kept(name, reason))

    def weight_bytes(self) -> WeightBytes:
        """What has been added so far."""
        return WeightBytes(self.packed_int4_bytes, self.float_bytes, tuple(self.kept))

    def save(self) -> None:
        """Write the .onnx file; its weights are beside it in `<file>.data`."""
        produced = {o for node in self._nodes for o in node.output}
        if missing := sorted(set(self._outputs) - produced):
            raise ValueError(f"no node produces the graph output {missing[0]}")
        graph = helper.make_graph(
            self._nodes,
            self.path.stem,
            list(self._inputs.values()),
            list(self._outputs.values()),
            self._initializers,
        )
        opsets = [helper.make_opsetid("", self._opset)]
        opsets += [helper.make_opsetid(d, 1) for d in sorted(self._domains - {""})]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=self._ir_version, producer_name="edgevlm"
        )
        self._data.flush()
        self.path.write_bytes(model.SerializeToString())
        self._saved = True

    def _add(
        self,
        name: str,
        array: NDArray[Any],
        dtype: int | None = None,
        shape: Sequence[int] | None = None,
    ) -> str:
        kind = dtype or ONNX_DTYPES[array.dtype.name]
        tensor = self._tensor(name, kind, array.shape if shape is None else shape)
        if array.nbytes < EXTERNAL_FROM:
            tensor.raw_data = array.tobytes()
        else:
            self._reserve(tensor, array.nbytes)
            self._data.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._initializers.append(tensor)
        return name

    def _tensor(self, name: str, dtype: int, shape: Sequence[int]) -> Any:
        if name in self._names:
            raise ValueError(f"two tensors are called {name}")
        self._names.add(name)
        tensor = onnx.TensorProto(name=name, data_type=dtype)
        tensor.dims.extend(shape)
        return tensor

    def _reserve(self, tensor: Any, nbytes: int) -> int:
        """Give a tensor its place in the data file, and go there."""
        offset = -(-self._data.tell() // ALIGNMENT) * ALIGNMENT
        self._data.seek(offset)
        tensor.data_location = TensorProto.EXTERNAL
        entries = {"location": data_file(self.path).name, "offset": offset, "length": nbytes}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        return offset


def _write_at(file: BinaryIO, values: NDArray[Any], offset: int) -> None:
    """All the bytes at a place of a file; its own position stays."""
    data = values.reshape(-1).view(np.uint8).data
    while data:
        written = os.pwrite(file.fileno(), data, offset)
        data, offset = data[written:], offset + written
