"""`edgevlm plan` as a person and as a script sees it; `edgevlm build` gives the same answer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from builders.limits import BuildOptions, wishes_of
from builders.plan_report import document, report
from builders.presets import find_model
from edgevlm.cli import main
from tests.tiny_models import TinyModels

ROOT = Path(__file__).resolve().parents[2]
POOLS = {"weights.llm", "kv_cache", "activations", "io", "staging", "runtime", "embedding_table"}


def plan(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_keys_that_scripts_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "qwen2-vl-2b", "--device", "orin-nano-8gb")
    assert found["fits"] is True and found["left_bytes"] > 0
    assert found["budget_bytes"] == (7620 << 20) - 1_100_000_000
    assert POOLS | {"weights.vision"} == {pool["name"] for pool in found["pools"]}
    for pool in found["pools"]:
        assert pool["bytes"] > 0 and pool["source"] == "planned" and pool["formula"]
    counted = [pool for pool in found["pools"] if not pool["reclaimable"]]
    assert found["total_bytes"] == sum(pool["bytes"] for pool in counted)
    assert sum(pool["share"] for pool in counted) == pytest.approx(1, abs=1e-3)
    assert found["limits"] == {
        "max_seq_len": 4096,
        "max_pixels": 1280 * 784,
        "max_images": 4,
        "slots": 1,
        "max_prefill_chunk": 256,
    }
    assert found["kv_bytes_per_token"] == 28_672 and found["image_tokens"] == 1280
    assert found["projected"]["first_token_ms"] > 0 and found["projected"]["assumptions"]
    assert found["load_peak"]["bytes"] and found["build_peak"]["bytes"] and found["disk"]["bytes"]
    assert found["suggestions"] == []


def test_every_time_printed_is_called_projected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen2-vl-7b", "--device", "agx-orin-64gb"]) == 0
    lines = capsys.readouterr().out.splitlines()
    timed = [line for line in lines if " ms" in line or "tokens/s" in line]
    assert timed and all("projected" in line for line in timed)
    assert any(line.startswith("FITS") for line in lines)


def test_f1_the_7b_tower_at_12_8_million_pixels_is_refused_on_8_gb_with_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["qwen2-vl-7b", "--device", "orin-nano-8gb", "--max-pixels", "12845056"]
    assert main(["plan", *words, "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["fits"] is False and found["total_bytes"] < 10 << 30
    over = found["total_bytes"] - found["budget_bytes"]
    assert f"{found['total_bytes']:,}" in err and f"{over:,} too many" in err
    fewer = next(s for s in found["suggestions"] if s["flag"] == "--max-pixels")
    assert 1280 * 784 < fewer["value"] < 12845056
    words[-1] = str(fewer["value"])
    assert plan(capsys, *words)["total_bytes"] == fewer["total_bytes"]


def test_f4_the_7b_in_4_bits_fits_16_and_8_gb_and_says_what_it_leaves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = plan(capsys, "qwen2.5-7b", "--device", "orin-nx-16gb")
    assert large["fits"] is True and large["left_bytes"] > 8 << 30
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 7802880 kB\nMemFree: 120000 kB\nMemAvailable: 6900000 kB\nCached: 6500000 kB\n"
    )
    monkeypatch.setattr("builders.plan_report.find_device", _device_of(tmp_path))
    small = plan(capsys, "qwen2.5-7b", "--device", "this-machine", "--executor", "tensorrt")
    assert small["fits"] is True
    available = 6_900_000 * 1024
    assert small["device"]["memory_bytes"] == available  # MemFree would have left nothing
    assert small["left_bytes"] == small["budget_bytes"] - small["total_bytes"] > 1 << 30


def _device_of(root: Path) -> Any:
    from builders.devices import find_device

    return lambda name: find_device(name, root)


def test_a_budget_and_a_reserve_are_solved(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["qwen2-vl-7b", "--device", "orin-nano-8gb", "--memory-budget", "6.25GiB"]
    found = plan(capsys, *words, "--reserve", "256MiB", "--slots", "2")
    assert found["fits"] is True and found["budget_bytes"] == 6 << 30
    assert found["limits"]["slots"] == 2 and found["limits"]["max_seq_len"] > 4096
    assert main(["plan", *words, "--min-seq-len", "32768", "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert "--max-seq-len" in {s["flag"] for s in refused["suggestions"]}


def test_a_budget_beyond_the_device_is_the_devices() -> None:
    found = document(
        report(
            "qwen2-vl-2b", "orin-nano-8gb", BuildOptions(memory_budget=64 << 30, reserve=1 << 30)
        )
    )
    assert found["budget_bytes"] == (7620 << 20) - 1_100_000_000 - (1 << 30)
    assert "less than --memory-budget" in found["budget_formula"]


@pytest.mark.parametrize("options", [{}, {"slots": 2}, {"min_seq_len": 300}, {"reserve": 1 << 20}])
def test_build_gets_the_same_answer(
    tiny: TinyModels, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: dict[str, int]
) -> None:
    checkpoint = str(tiny.get("qwen2_vl").checkpoint)
    flags = [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    plain = document(report(checkpoint, "64GiB", BuildOptions(), "host"))
    budget = ["--memory-budget", str(plain["total_bytes"] - 1_000_000)]
    found = plan(capsys, checkpoint, "--device", "64GiB", "--executor", "host", *budget, *flags)
    words = ["build", checkpoint, str(tmp_path / "out"), "--dry-run", "--json", *budget, *flags]
    assert main(words) == 0
    built = json.loads(capsys.readouterr().out)
    for key in ("limits", "total_bytes", "budget_bytes", "fits"):
        assert built[key] == found[key]
    assert built["limits"] != plain["limits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["internvl2-8b", "--device", "8GiB"], "not supported yet"),
        (["qwen2-vl-2b", "--device", "orin-nano-9gb"], "no device 'orin-nano-9gb'"),
        (["qwen2-vl-2b", "--device", "8GiB", "--plot", "x.bmp"], ".svg, .png or .html"),
        (["qwen2.5-7b", "--device", "8GiB", "--max-pixels", "1000000"], "reads text only"),
        (["qwen2-vl-2b", "--device", "rtx-8gb", "--executor", "host", "--lowering", "native"],
         "no lowering"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and err.count("\n") == 1


def test_a_picture_larger_than_the_context_is_noted() -> None:
    found = document(report("qwen2-vl-2b", "agx-orin-64gb", BuildOptions(max_pixels=12845056)))
    assert any("16,384 tokens" in note and "4,096" in note for note in found["notes"])


def test_least_limits_hold_the_picture_and_a_question() -> None:
    wishes = wishes_of(find_model("qwen2-vl-2b").config, BuildOptions())
    assert wishes.shortest(1280 * 784) == 1408


def test_it_needs_no_runtime_of_any_kind() -> None:
    code = (
        "import sys; from edgevlm.cli import main; "
        "main(['plan', 'qwen2-vl-2b', '--device', 'orin-nano-8gb', '--json']); "
        "print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    heavy = {"torch", "transformers", "onnxruntime", "tensorrt", "tensorrt_rtx", "cuda"}
    assert not heavy & set(done.stderr.split())
