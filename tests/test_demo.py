"""The demo as a newcomer runs it: each command in a process of its own, over the shipped model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from builders.demo.command import QUESTIONS
from builders.demo.scenes import KINDS, examples
from edgevlm.cli import INTERRUPTED

ROOT = Path(__file__).resolve().parents[1]


def edgevlm(*words: Any, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgevlm.cli", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, input=stdin, check=False
    )


def document(*words: Any) -> dict[str, Any]:
    done = edgevlm(*words, "--json")
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "bundle"


@pytest.fixture(scope="module")
def demo(bundle: Path) -> dict[str, Any]:
    return document("demo", "--dir", bundle, "--eval", 2 * len(KINDS), "--seed", 5)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "a [red] picture.png"
    next(examples(1, 1)).images[0].save(path)
    return path


def test_the_demo_answers_what_ships_with_it(demo: dict[str, Any], bundle: Path) -> None:
    assert demo["bundle"] == str(bundle)
    assert len({json.dumps(answer["image"]) for answer in demo["answers"]}) >= 3
    for answer in demo["answers"]:
        assert answer["answer"] == answer["expected"], answer
    assert demo["allocations_after_start"] == 0


def test_the_demo_measures_every_kind(demo: dict[str, Any]) -> None:
    assert set(demo["by_kind"]) == set(KINDS)
    assert 0 <= demo["accuracy"] <= 1
    assert sum(demo["counts"].values()) == 2 * len(KINDS)


def test_the_demo_bundle_is_kept_until_something_changes(
    demo: dict[str, Any], bundle: Path
) -> None:
    before = (bundle / "bundle.json").stat().st_mtime_ns
    done = edgevlm("demo", "--dir", bundle)
    assert done.returncode == 0
    assert "memory plan" in done.stdout
    assert (bundle / "bundle.json").stat().st_mtime_ns == before
    (bundle / "tokenizer.json").write_text("{}")
    done = edgevlm("demo", "--dir", bundle)
    assert done.returncode == 0
    assert "building it again" in done.stderr
    assert (bundle / "bundle.json").stat().st_mtime_ns != before


def test_the_questions_have_the_form_that_the_demo_reads() -> None:
    assert QUESTIONS.is_file()


def test_inspect_shows_the_plan(demo: dict[str, Any], bundle: Path) -> None:
    found = document("inspect", bundle)
    plan = found["plan"]
    assert plan["total_bytes"] == sum(p["bytes"] for p in plan["pools"] if not p["reclaimable"])
    for pool in plan["pools"]:
        assert pool["source"] in ("planned", "reported")
        assert pool["formula"]
    assert set(plan["limits"]) >= {"max_seq_len", "max_pixels", "max_images", "slots"}
    for engine in ("vision", "llm"):
        report = found["build"]["engines"][engine]
        assert {"weights_bytes", "packed_int4_bytes", "scratch_bytes"} <= set(report)
        assert {"seconds", "peak_bytes", "stages"} <= set(report)
    assert found["target"] == found["lowering"] == "host"
    assert all({"name", "reason"} <= set(entry) for entry in found["kept_16bit"])
    done = edgevlm("inspect", bundle)
    assert done.returncode == 0
    assert all(pool["name"] in done.stdout for pool in plan["pools"])


def test_run_and_its_document_agree(demo: dict[str, Any], bundle: Path, picture: Path) -> None:
    words = ("run", bundle, "what shape is it?", "--image", picture, "--temperature", 0)
    done = edgevlm(*words)
    assert done.returncode == 0, done.stderr
    found = document(*words)
    assert done.stdout == found["text"] + "\n"
    assert found["usage"]["image_tokens"] > 0
    assert {"planned_bytes", "peak_rss_bytes"} <= set(found["memory"])
    assert found["memory"]["allocations_after_start"] == 0
    steps = ("load", "preprocess", "vision", "prefill", "decode", "first_token")
    assert {f"{step}_ms" for step in steps} <= set(found["timings"])


def test_run_reports_log_probabilities_as_strict_json(demo: dict[str, Any], bundle: Path) -> None:
    found = document("run", bundle, "hello", "--logprobs", 20, "--top-k", 1, "--max-tokens", 3)
    assert len(found["logprobs"]) == len(found["token_ids"])


def test_chat_does_not_compute_its_history_again(
    demo: dict[str, Any], bundle: Path, picture: Path
) -> None:
    lines = (
        f"/image {picture}\nwhat shape is it?\nwhat color is it?\n/stats\n/image nowhere\n/quit\n"
    )
    done = edgevlm("chat", bundle, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "of them cached" in done.stdout
    assert done.stderr.count("error: ") == 1


def test_bench_is_not_served_from_the_cache(
    demo: dict[str, Any], bundle: Path, picture: Path
) -> None:
    words = ("--prompt-tokens", 40, "--new-tokens", 5, "--runs", 2, "--image", picture)
    found = document("bench", bundle, *words)
    for name in ("prefill_tok_s", "decode_tok_s", "vision_ms", "first_token_ms", "load_s"):
        assert found[name] > 0, name
    assert found["peak_rss_bytes"] > 0
    assert found["python_ms_per_token"] > 0
    assert found["allocations_after_start"] == 0
    for run in found["runs"]:
        assert run["new_tokens"] == 5
        assert run["cached_tokens"] < 8 < run["prompt_tokens"]
    done = edgevlm("bench", bundle, "--prompt-tokens", 10**6)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the prompt has")


def test_build_plans_without_building(demo: dict[str, Any], tmp_path: Path) -> None:
    words = ("build", ROOT / "builders/demo/checkpoint", tmp_path / "bundle", "--dry-run")
    large = document(*words)
    small = document(*words, "--max-seq-len", 512, "--max-pixels", "112x112")
    assert small["total_bytes"] < large["total_bytes"]
    assert small["limits"]["max_pixels"] == 112 * 112
    refused = edgevlm(*words, "--memory-budget", "1MiB", "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["fits"] is False
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_build_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    done = edgevlm("build", tmp_path, tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_ctrl_c_is_quiet(demo: dict[str, Any], bundle: Path) -> None:
    code = (
        "import _thread, threading, sys; from edgevlm.cli import main;"
        "threading.Timer(2, _thread.interrupt_main).start();"
        f"sys.exit(main(['run', {str(bundle)!r}, 'x', '--ignore-eos']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == INTERRUPTED
    assert done.stderr == ""
