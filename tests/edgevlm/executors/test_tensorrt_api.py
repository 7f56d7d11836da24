"""Every TensorRT name in our source, against what each release really has.

tests/data/tensorrt_api.json is read from the bindings of five releases; tensorrt-rtx, where it is
installed, is asked itself, argument by argument.
"""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgevlm.executors.tensorrt_api import FEATURES, MODULES, OLDEST, Api, parse_version

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "edgevlm/executors").glob("tensorrt*.py"))
RELEASES: dict[str, list[str]] = json.loads((ROOT / "tests/data/tensorrt_api.json").read_text())[
    "versions"
]
# What these names are bound to in our source is TensorRT's.
VENDOR = {"trt", "module", "engine", "_engine", "context", "_runtime"}
OURS = {"__version__"}
# Overridden methods: TensorRT looks for them by name in our classes.
OVERRIDES = {"allocate", "allocate_async", "reallocate", "deallocate", "deallocate_async"}
# Short strings that the extraction lost; NVIDIA/TensorRT's python/src/infer/pyCore.cpp has them in
# v10.3.0, v10.7.0, v10.13.3, v10.16 and v11.1.
LOST = {"INPUT", "allocate", "deallocate"}
PARTS = {
    "Runtime": ("deserialize_cuda_engine", "gpu_allocator"),
    "ICudaEngine": FEATURES["engine"].names + FEATURES["aliased_tensors"].names,
    "IExecutionContext": FEATURES["context"].names,
    "IStreamReaderV2": FEATURES["stream_reader_v2"].names,
    "IGpuAllocator": tuple(OVERRIDES),
}
ARGUMENTS = {  # what our calls pass, beside self
    ("Runtime", "deserialize_cuda_engine"): 1,
    ("ICudaEngine", "create_execution_context"): 1,
    ("ICudaEngine", "get_tensor_name"): 1,
    ("ICudaEngine", "get_tensor_mode"): 1,
    ("ICudaEngine", "get_tensor_dtype"): 1,
    ("ICudaEngine", "get_tensor_location"): 1,
    ("ICudaEngine", "get_aliased_input_tensor"): 1,
    ("IExecutionContext", "set_optimization_profile_async"): 2,
    ("IExecutionContext", "set_device_memory"): 2,
    ("IExecutionContext", "set_input_shape"): 2,
    ("IExecutionContext", "set_tensor_address"): 2,
    ("IExecutionContext", "infer_shapes"): 0,
    ("IExecutionContext", "execute_async_v3"): 1,
}
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx is not installed"
)


def owner(node: ast.expr) -> str | None:
    """The name that an attribute is taken of: `trt`, or `module` of `self._api.module`."""
    if isinstance(node, ast.Subscript):
        return "context" if owner(node.value) in ("contexts", "_contexts") else None
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def vendor_names(path: Path) -> Iterator[str]:
    """Names of TensorRT that a file uses: attributes of its objects, and of those attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and root(node) in VENDOR:
            yield node.attr


def root(node: ast.Attribute) -> str | None:
    """`trt` of `trt.ILogger.Severity`, and of `trt` itself nothing."""
    inner = owner(node.value)
    if inner in VENDOR or not isinstance(node.value, ast.Attribute):
        return inner
    return root(node.value)


USED = {name for path in SOURCES for name in vendor_names(path)} - OURS


def has(release: str, name: str) -> bool:
    if name in LOST:
        return True
    names = RELEASES[release]
    return name in names or any(other.endswith(name) for other in names)


def claimed(release: str) -> set[str]:
    api = Api(None, "tensorrt", parse_version(release))
    return {name for key, entry in FEATURES.items() if api.has(key) for name in entry.names}


def test_the_walk_finds_what_we_call() -> None:
    assert {"execute_async_v3", "USER_MANAGED", "IStreamReaderV2", "device_memory_size_v2"} <= USED
    assert len(USED) > 25


def test_every_name_in_our_source_is_in_the_table() -> None:
    known = {name for entry in FEATURES.values() for name in entry.names} | {"log", "__init__"}
    assert USED - known == set()


def test_every_name_in_the_table_is_used() -> None:
    data_types = {"FLOAT", "HALF", "INT64", "INT32", "BOOL"}  # looked up by name
    unused = {name for entry in FEATURES.values() for name in entry.names} - USED
    assert unused <= data_types | {"Severity"} | OVERRIDES | {"read", "seek"}


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_all_that_the_table_claims(release: str) -> None:
    assert {name for name in claimed(release) if not has(release, name)} == set()


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        ("stream_reader_v1", "IStreamReader"),
        ("stream_reader_v2", "IStreamReaderV2"),
        ("aliased_tensors", "get_aliased_input_tensor"),
    ],
)
@pytest.mark.parametrize("release", RELEASES)
def test_the_table_denies_nothing_that_a_release_has(release: str, feature: str, name: str) -> None:
    api = Api(None, "tensorrt", parse_version(release))
    assert api.has(feature) == (name in RELEASES[release])


def test_the_oldest_release_is_in_the_list() -> None:
    assert min(parse_version(release) for release in RELEASES) == OLDEST["tensorrt"]


@pytest.fixture(scope="module")
def rtx() -> Any:
    return importlib.import_module(MODULES["tensorrt-rtx"])


@pytest.mark.rtx
@needs_rtx
@pytest.mark.parametrize("part", PARTS)
def test_rtx_has_our_names_where_we_look_for_them(rtx: Any, part: str) -> None:
    module_level = {name for name in PARTS[part] if hasattr(rtx, name) or name.isupper()}
    methods = set(PARTS[part]) - module_level - {"allocate", "deallocate"}
    missing = {name for name in methods if not hasattr(getattr(rtx, part), name)}
    assert missing <= {part}
    for name in module_level - {"FLOAT", "HALF", "INT64", "INT32", "BOOL"}:
        enums = (rtx.TensorIOMode, rtx.TensorLocation, rtx.ExecutionContextAllocationStrategy)
        assert hasattr(rtx, name) or any(hasattr(enum, name) for enum in enums), name
    assert all(hasattr(rtx.DataType, n) for n in ("FLOAT", "HALF", "INT64", "INT32", "BOOL"))


@pytest.mark.rtx
@needs_rtx
@pytest.mark.parametrize(("kind", "method"), ARGUMENTS, ids=lambda value: value)
def test_rtx_takes_as_many_arguments_as_we_give(rtx: Any, kind: str, method: str) -> None:
    text = getattr(getattr(rtx, kind), method).__doc__
    signatures = re.findall(rf"{method}\(self[^)\n]*\) ->", text)
    assert signatures, text
    counts = {signature.count(": ") - 1 for signature in signatures}
    assert ARGUMENTS[kind, method] in counts, signatures


@pytest.mark.rtx
@needs_rtx
def test_rtx_takes_our_classes(rtx: Any) -> None:
    from edgevlm.executors.arena import Arena
    from edgevlm.executors.tensorrt_callbacks import Owner, Words, make_allocator, make_logger

    words = Words()
    arena = Arena.__new__(Arena)  # nothing is allocated here
    runtime = rtx.Runtime(make_logger(rtx, words))
    runtime.gpu_allocator = make_allocator(rtx, arena, Owner())
    assert runtime.deserialize_cuda_engine(b"no engine") is None
    assert "readHeader" in words.take()
