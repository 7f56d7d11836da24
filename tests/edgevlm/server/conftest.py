"""One tiny model for all tests of the service: once as it is, once with scripted answers."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from edgevlm.vlm import VLM
from tests.paced_executor import PacedExecutor, paced_vlm, with_tools
from tests.serving import Running, serving
from tests.tiny_models import TinyModels

KIND = "qwen2_vl"


@dataclass
class Stage:
    """A service whose answers are scripted."""

    running: Running
    vlm: VLM
    executor: PacedExecutor

    def play(self, text: str, end: bool = True, paced: bool = False) -> None:
        """What every answer says from now on; `end`: the model stops by itself."""
        ids = self.vlm.tokenizer.encode(text)
        stop = self.vlm.tokenizer.token_to_id("<|im_end|>")
        assert stop is not None
        self.executor.play([*ids, stop] if end else ids, paced)


@pytest.fixture(scope="session")
def tiny_vlm(tiny: TinyModels) -> Iterator[VLM]:
    with VLM(tiny.get(KIND).bundle.path, threads=1, check=False) as vlm:
        yield vlm


@pytest.fixture(scope="session")
def tool_vlm(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLM]:
    bundle = with_tools(tiny.get(KIND).bundle.path, tmp_path_factory.mktemp("tools") / "bundle")
    with VLM(bundle, threads=1, check=False) as vlm:
        yield vlm


@pytest.fixture(scope="session")
def scripted(
    tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLM, PacedExecutor]]:
    bundle = with_tools(tiny.get(KIND).bundle.path, tmp_path_factory.mktemp("script") / "bundle")
    vlm, executor = paced_vlm(bundle, max_queue=4)
    with vlm:
        yield vlm, executor
        executor.free()


@pytest.fixture(scope="session")
def shared_stage(scripted: tuple[VLM, PacedExecutor]) -> Iterator[Stage]:
    with serving(scripted[0], max_queue=4) as running:
        yield Stage(running, *scripted)


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    """Says "Hello" until it is told otherwise."""
    shared_stage.play("Hello")
    yield shared_stage
    shared_stage.executor.free()


@pytest.fixture(scope="session")
def live(tiny_vlm: VLM) -> Iterator[Running]:
    """A service with the real executor."""
    with serving(tiny_vlm) as running:
        yield running
