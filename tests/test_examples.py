"""The examples do what their docstrings say."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from edgevlm import VLM
from tests.tiny_models import TinyModels, picture

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "What is it?"


@pytest.fixture
def webcam() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("webcam", ROOT / "examples/webcam.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


@pytest.fixture
def bundle(tiny: TinyModels) -> str:
    return str(tiny.get("qwen2_vl").bundle.path)


def run(webcam: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["webcam.py", *words, "--max-tokens", "3"])
    status: int = webcam.main()
    return status


def test_webcam_takes_a_folder_by_name(
    webcam: ModuleType,
    bundle: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for seed, name in enumerate(("c.jpg", "a.PNG", "b.png")):
        picture(80, 60, seed).save(tmp_path / name)
    (tmp_path / "notes.txt").touch()
    words = (bundle, QUESTION, "--pictures", str(tmp_path), "--count", "2")
    assert run(webcam, monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert out.startswith("a.PNG: ") and "\nb.png: " in out and "c.jpg" not in out


def test_webcam_shows_frames_as_rgb_and_gives_the_camera_back(
    webcam: ModuleType,
    bundle: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = np.asarray(picture(80, 60))
    calls: list[str] = []
    capture = SimpleNamespace(
        isOpened=lambda: True,
        set=lambda *_: True,
        grab=lambda: calls.append("grab"),
        read=lambda: (len(calls) < 3, seen[:, :, ::-1]),
        release=lambda: calls.append("release"),
    )
    cv2 = SimpleNamespace(
        VideoCapture=lambda index: capture,
        CAP_PROP_BUFFERSIZE=38,
        COLOR_BGR2RGB=4,
        cvtColor=lambda frame, code: np.ascontiguousarray(frame[:, :, ::-1]),
    )
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    assert run(webcam, monkeypatch, bundle, QUESTION) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: camera 0 gave no frame; was it unplugged?\n"
    assert calls == ["grab"] * 3 + ["release"]
    with VLM(bundle) as vlm:
        params = webcam.SamplingParams(max_tokens=3, temperature=0)
        expected = vlm.generate(QUESTION, [seen], params).text
    assert captured.out == f"{expected}\n{expected}\n"


@pytest.mark.parametrize("there", [False, True], ids=["no OpenCV", "no camera"])
def test_webcam_says_what_is_missing(
    there: bool,
    webcam: ModuleType,
    bundle: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capture = SimpleNamespace(isOpened=lambda: False, release=lambda: None)
    cv2 = SimpleNamespace(VideoCapture=lambda index: capture) if there else None
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    assert run(webcam, monkeypatch, bundle, QUESTION) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "--pictures FOLDER" in err
