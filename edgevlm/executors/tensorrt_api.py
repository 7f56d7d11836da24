"""What exists in which TensorRT, as data; and the module itself behind one door.

JetPack 6 has 10.3, JetPack 7 has 10.13 and 10.16, desktops have up to 11; tensorrt-rtx counts its
releases from 1.0. What differs between them is asked of this table and nowhere else.
"""

import importlib
import re
from dataclasses import dataclass
from typing import Any, Literal

from edgevlm.checks import FIRST_TENSORRT
from edgevlm.errors import ExecutorError

Version = tuple[int, int]
Flavour = Literal["tensorrt", "tensorrt-rtx"]
OLDEST: dict[Flavour, Version] = {"tensorrt": (10, 3), "tensorrt-rtx": (1, 7)}
MODULES: dict[Flavour, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
REMEDY: dict[Flavour, str] = {
    "tensorrt": "on a Jetson install JetPack's python3-libnvinfer and make the virtual environment "
    "with --system-site-packages",
    "tensorrt-rtx": "pip install 'edgevlm[rtx]'",
}


@dataclass(frozen=True)
class Feature:
    """Names of the Python bindings that come and go together. `until`: the first without them."""

    names: tuple[str, ...]
    since: Version = OLDEST["tensorrt"]
    until: Version | None = None
    rtx: bool = True


FEATURES = {
    "runtime": Feature(
        ("Runtime", "ILogger", "Severity", "ERROR", "INTERNAL_ERROR", "WARNING")
        + ("deserialize_cuda_engine", "gpu_allocator", "IGpuAllocator", "allocate", "reallocate")
        + ("deallocate", "allocate_async", "deallocate_async")
    ),
    "engine": Feature(
        ("num_io_tensors", "get_tensor_name", "get_tensor_mode", "TensorIOMode", "INPUT")
        + ("get_tensor_dtype", "DataType", "FLOAT", "HALF", "INT64", "INT32", "BOOL")
        + ("get_tensor_location", "TensorLocation", "DEVICE", "num_optimization_profiles")
        + ("device_memory_size_v2", "create_execution_context")
        + ("ExecutionContextAllocationStrategy", "USER_MANAGED")
    ),
    "context": Feature(
        ("set_optimization_profile_async", "set_device_memory", "temporary_allocator")
        + ("set_input_shape", "set_tensor_address", "infer_shapes", "execute_async_v3", "name")
    ),
    "stream_reader_v1": Feature(("IStreamReader", "read"), until=(11, 0), rtx=False),
    "stream_reader_v2": Feature(("IStreamReaderV2", "read", "seek"), since=(10, 7)),
    "aliased_tensors": Feature(("get_aliased_input_tensor",), since=(10, 15)),
}


@dataclass(frozen=True)
class Api:
    """A TensorRT module and what it has."""

    module: Any
    flavour: Flavour
    version: Version

    def has(self, feature: str) -> bool:
        """Whether this release has a feature of the table."""
        entry = FEATURES[feature]
        if self.flavour == "tensorrt-rtx":
            return entry.rtx
        return entry.since <= self.version and (entry.until is None or self.version < entry.until)


def load_api(flavour: Flavour, lowering: str) -> Api:
    """Import the module and check that it can run such a bundle. Raises ExecutorError."""
    try:
        module = importlib.import_module(MODULES[flavour])
    except ImportError as error:
        raise ExecutorError(
            f"{flavour} is not installed here ({error}); {REMEDY[flavour]}"
        ) from error
    version = parse_version(module.__version__)
    wanted = OLDEST[flavour]
    if flavour == "tensorrt":
        wanted = max(wanted, FIRST_TENSORRT.get(lowering, wanted))
    if version < wanted:
        raise ExecutorError(
            f"a {lowering} bundle needs {flavour} {wanted[0]}.{wanted[1]} or newer and this is "
            f"{module.__version__}; build it with --lowering classic or update JetPack"
        )
    return Api(module, flavour, version)


def parse_version(text: str) -> Version:
    """(10, 16) for "10.16.2.10". Raises ExecutorError."""
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise ExecutorError(f"TensorRT calls its version {text!r}, which edgevlm cannot read")
    return int(found[1]), int(found[2])
