"""Tiny models that several test modules share; each is made once, when it is first asked for."""

import pytest

from tests.tiny_models import TinyModels


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))
