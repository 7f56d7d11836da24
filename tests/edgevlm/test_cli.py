"""The command line over a scripted model: what goes where, and with which exit status."""

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from edgevlm import cli
from edgevlm.commands import arguments, chat, run
from edgevlm.commands.plan_report import human_bytes
from edgevlm.errors import BadImage, BundleError, PromptTooLong
from edgevlm.generation import Delta, Generation
from edgevlm.sampling import SamplingParams


class ScriptedVLM:
    """Says what it was told to say; remembers what it was asked."""

    pieces = ("A ", "red ", "circle.")
    error: Exception | None = None
    asked: list[tuple[Any, list[Any], SamplingParams]]

    def __init__(self, path: Path, **options: Any) -> None:
        if not path.name.startswith("bundle"):
            raise BundleError(f"{path} is not a bundle")
        self.options = options
        manifest = SimpleNamespace(
            limits=SimpleNamespace(max_seq_len=128), model=SimpleNamespace(model_type="qwen2_vl")
        )
        self.bundle = SimpleNamespace(path=path, manifest=manifest)

    def __enter__(self) -> "ScriptedVLM":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def stream(self, prompt: Any, images: list[Any], params: SamplingParams) -> Iterator[Delta]:
        self.asked.append((prompt, list(images), params))
        if self.error is not None:
            raise self.error
        return self._stream(images)

    def _stream(self, images: list[Any]) -> Iterator[Delta]:
        text = "".join(self.pieces)
        for piece in self.pieces:
            if piece == "^C":
                raise KeyboardInterrupt
            yield Delta(piece, [1])
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "image_tokens": 4 * len(images)}
        generation = Generation(
            text=text,
            token_ids=[1, 2, 3],
            logprobs=None,
            finish_reason="stop",
            usage={**usage, "cached_tokens": 5, "images": []},
            timings={"first_token_ms": 1.0, "decode_ms": 2.0, "prefill_ms": 1.0, "load_ms": 1.0},
            memory={"planned_bytes": 1, "peak_rss_bytes": 2, "allocations_after_start": 0},
        )
        yield Delta("", [], None, "stop", generation)

    def generate(self, prompt: Any, images: list[Any], params: SamplingParams) -> Generation:
        *_, last = self.stream(prompt, images, params)
        assert last.generation is not None
        return last.generation


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedVLM]:
    class Scripted(ScriptedVLM):
        asked: list[tuple[Any, list[Any], SamplingParams]] = []

    for module in (run, chat):
        monkeypatch.setattr(module, "VLM", Scripted)
    return Scripted


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.new("RGB", (30, 20), "red").save(path)
    return path


def test_run_streams_to_stdout(scripted: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "bundle", "what is it?"]) == 0
    out, err = capfd.readouterr()
    assert out == "A red circle.\n"
    assert err == ""
    prompt, images, params = scripted.asked[0]
    assert prompt == [{"role": "user", "content": "what is it?"}]
    assert images == []
    assert params == SamplingParams()


def test_run_json_is_one_document(scripted: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "bundle", "what is it?", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["text"] == "A red circle."
    assert {"token_ids", "finish_reason", "usage", "timings", "memory"} <= set(document)


def test_run_passes_flags_on(scripted: Any, picture: Path) -> None:
    words = ["run", "bundle", "q", "--image", str(picture), "--image", "b.png", "--system", "S"]
    words += ["--temperature", "0.5", "--top-k", "3", "--stop", "x", "--stop", "y"]
    assert cli.main([*words, "--max-tokens", "7", "--ignore-eos", "--seed", "0"]) == 0
    prompt, images, params = scripted.asked[0]
    assert prompt[0] == {"role": "system", "content": "S"}
    assert [part["type"] for part in prompt[1]["content"]] == ["image", "image", "text"]
    assert images == [str(picture), "b.png"]
    assert params == SamplingParams(
        temperature=0.5, top_k=3, stop=("x", "y"), max_tokens=7, ignore_eos=True, seed=0
    )


def test_every_sampling_parameter_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    arguments.run(parser)
    flags = {action.dest for action in parser._actions}
    assert {field.name for field in dataclasses.fields(SamplingParams)} <= flags


def test_run_reads_the_question_from_stdin(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a long\nquestion\n"))
    assert cli.main(["run", "bundle", "-"]) == 0
    assert scripted.asked[0][0][0]["content"] == "a long\nquestion"


@pytest.mark.parametrize(
    "words",
    [
        ["run", "nowhere", "q"],
        ["run", "bundle", ""],
        ["run", "bundle", "q", "--temperature", "-1"],
        ["run", "bundle", "q", "--top-p", "nan"],
        ["run", "bundle", "q", "--max-tokens", "0"],
        ["run", "bundle", "q", "--json", "--max-tokens", "0"],
        ["chat", "nowhere"],
        ["inspect", "nowhere"],
        ["inspect", "nowhere", "--json"],
        ["bench", "nowhere"],
        ["bench", "bundle", "--image", "nowhere.png"],
    ],
)
def test_an_error_is_one_line_and_status_1(
    words: list[str], scripted: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert "bug" not in err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["--fly"],
        ["run"],
        ["run", "bundle"],
        ["run", "bundle", "q", "--fly"],
        ["run", "bundle", "q", "--temperature", "warm"],
        ["bench", "bundle", "--runs", "0"],
        ["bench", "bundle", "--threads", "-1"],
    ],
)
def test_wrong_usage_is_status_2(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = cli.main(words)
    except SystemExit as leave:
        status = leave.code
    assert status == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "usage: edgevlm" in err


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([c, "--help"] for c in cli.COMMANDS)]
)
def test_help_is_status_0_on_stdout(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        cli.main([*words, "--help"])
    assert leave.value.code == 0
    out, err = capfd.readouterr()
    assert out
    assert err == ""


def test_an_unexpected_error_is_one_line_and_debug_shows_more(
    scripted: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    scripted.error = RuntimeError("two\nlines")
    assert cli.main(["run", "bundle", "q"]) == 1
    err = capfd.readouterr().err
    assert err.startswith("error: RuntimeError: two lines (")
    assert "--debug" in err
    assert err.count("\n") == 1
    assert cli.main(["run", "bundle", "q", "--debug"]) == 1
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: RuntimeError: two lines\n")


def test_ctrl_c_is_status_130(scripted: Any, capfd: pytest.CaptureFixture[str]) -> None:
    scripted.pieces = ("A ", "^C")
    assert cli.main(["run", "bundle", "q"]) == 130
    assert "Traceback" not in capfd.readouterr().err


def test_what_libraries_print_stays_out_of_the_document(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def generate(self: ScriptedVLM, *words: Any) -> Generation:
        print("noise from Python")
        os.write(1, b"noise from C\n")
        subprocess.run([sys.executable, "-c", "print('noise from a child')"], check=True)
        return ScriptedVLM.generate(self, *words)

    monkeypatch.setattr(scripted, "generate", generate)
    assert cli.main(["run", "bundle", "q", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["text"] == "A red circle."
    assert err.count("noise") == 3


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return cli.main(["chat", "bundle"])


def test_chat_sends_the_whole_conversation(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, picture: Path
) -> None:
    show = f"/image {picture}"
    assert talk(monkeypatch, show, show, "what?", "and the colour?", show, "this?", "/quit") == 0
    first, second, third = scripted.asked
    assert [p["type"] for p in first[0][0]["content"]] == ["image", "image", "text"]
    assert first[1] == [str(picture)] * 2
    assert second[0] == [
        *first[0],
        {"role": "assistant", "content": "A red circle."},
        {"role": "user", "content": "and the colour?"},
    ]
    assert second[1] == first[1]
    assert third[1] == [str(picture)] * 3


def test_chat_goes_on_after_a_bad_picture_or_a_refusal(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scripted, "error", PromptTooLong("too long"))
    assert talk(monkeypatch, "/image nowhere.png", "hello", "/stats") == 0
    out, err = capfd.readouterr()
    assert err.count("error: ") == 2
    assert "nothing was answered" in out
    assert scripted.asked[0][1] == []


def test_a_refused_message_leaves_no_trace(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, picture: Path
) -> None:
    conversation = chat.Chat(scripted(Path("bundle")), SamplingParams())
    conversation.waiting = [str(picture)]
    monkeypatch.setattr(scripted, "error", BadImage("no picture"))
    with pytest.raises(BadImage):
        conversation.answer("what?")
    assert (conversation.messages, conversation.images, conversation.waiting) == ([], [], [])


def test_chat_commands(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = ("hello", "/stats", "/reset", "again", "/system Be brief.", "once more", "/help", "/x")
    assert talk(monkeypatch, *lines) == 0
    out = capfd.readouterr().out
    assert "5 of them cached" in out
    assert out.count("/image FILE") == 2
    assert [len(messages) for messages, *_ in scripted.asked] == [1, 1, 2]
    assert scripted.asked[2][0][0] == {"role": "system", "content": "Be brief."}


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.pieces = ("A ", "^C")
    assert talk(monkeypatch, "what?", "again") == 0
    assert scripted.asked[1][0][1] == {"role": "assistant", "content": "A "}


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GiB", 6 << 30), ("512MiB", 512 << 20), ("1.5g", 3 << 29), ("7", 7), ("2 KB", 2048)],
)
def test_byte_sizes(text: str, size: int) -> None:
    assert arguments.byte_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "6 apples", "nan", "0x10"])
def test_what_is_no_byte_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.byte_size(text)


def test_pixel_counts() -> None:
    assert arguments.pixel_count("640x480") == arguments.pixel_count("307200") == 307200
    for text in ("640x", "x480", "640x480x3", "-1", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            arguments.pixel_count(text)


def test_human_bytes() -> None:
    sizes = (0, 999, 1000, 1 << 20, 3 << 29, 5 << 40)
    expected = ["0 B", "999 B", "0.98 KiB", "1.00 MiB", "1.50 GiB", "5120 GiB"]
    assert [human_bytes(size) for size in sizes] == expected


def edgevlm(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real thing in a process of its own."""
    command = [sys.executable, "-m", "edgevlm.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_a_process_exits_with_the_status() -> None:
    assert edgevlm("--help").returncode == 0
    assert edgevlm("inspect", "/nowhere").returncode == 1
    assert edgevlm("fly").returncode == 2


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m edgevlm.cli run --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
