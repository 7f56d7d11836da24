"""The driver that stands in for CUDA: built once, loaded once a process, leaks looked for."""

import gc
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgevlm.bundle import Bundle
from tests.cuda_stub import Stub, build
from tests.scripted_bundles import NEW, Bundles, Install
from tests.scripted_tensorrt import Scripted
from tests.tiny_models import TinyModels


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    """The stub, loaded before the bindings look for a driver."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed; it builds the stand-in for the CUDA driver")
    if not (importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")):
        pytest.skip("cuda-bindings is not installed; pip install 'edgevlm[dev]'")
    return Stub(build(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def stub(driver: Stub) -> Iterator[Stub]:
    """The stub as it was loaded; a test that leaves something behind fails."""
    driver.reset()
    yield driver
    driver.reset()
    assert driver.leaks() == {}


@pytest.fixture
def install(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a scripted TensorRT of some version in place."""

    def install(version: str = NEW, name: str = "tensorrt") -> Scripted:
        scripted = Scripted(stub, version)
        monkeypatch.setitem(sys.modules, name, scripted.module())
        return scripted

    return install


@pytest.fixture(scope="session")
def bundles(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return Bundles(tiny, tmp_path_factory.mktemp("scripted"))


@pytest.fixture
def start() -> Iterator[Callable[[Bundle], Any]]:
    """Start executors; all of them are closed at the end, and gone."""
    from edgevlm.executors.tensorrt import TensorRTExecutor

    started: list[Any] = []

    def start(bundle: Bundle, kind: type = TensorRTExecutor) -> Any:
        started.append(kind(bundle))
        return started[-1]

    yield start
    for executor in started:
        executor.close()
    gc.collect()
