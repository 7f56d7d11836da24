"""Times a bundle on the host executor, and llama.cpp beside it where its GGUF is given.

  python benchmarks/bench_host.py BUNDLE [--gguf FILE --peer-python PYTHON] [--runs 5] [--cpu]

Every run is a process of its own, ours and llama.cpp's in turn, so that what else the machine does
falls on both; the ratios are medians over runs. `--cpu`: one thread each and processor seconds
instead of the clock, for a busy machine. One JSON document on stdout. The peer's
interpreter needs xllamacpp and nothing of ours: this file imports only the standard library.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

FIGURES = ("load_s", "prefill_tok_s", "decode_tok_s", "peak_rss_bytes", "python_ms_per_token")


def main() -> int:
    """Run the children in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Raw)
    parser.add_argument("bundle")
    parser.add_argument("--gguf", help="the same weights for llama.cpp")
    parser.add_argument("--peer-python", help="an interpreter that has xllamacpp")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--child", choices=("ours", "peer"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cpu:
        given.threads = 1
    if given.child:
        figures = (ours if given.child == "ours" else peer)(given)
        print(json.dumps(figures))
        return 0
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for _ in range(given.runs):
        runs["ours"].append(child("ours", sys.executable, given))
        if given.gguf and given.peer_python:
            runs["peer"].append(child("peer", given.peer_python, given))
    print(json.dumps(summary(runs, given), indent=1))
    return 0


Raw = argparse.RawDescriptionHelpFormatter


def child(which: str, python: str, given: argparse.Namespace) -> dict[str, float]:
    """One run in a process of its own."""
    command = [python, __file__, given.bundle, "--child", which]
    for name in ("prompt_tokens", "new_tokens", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    command += ["--cpu"] if given.cpu else []
    command += ["--gguf", given.gguf] if given.gguf else []
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def summary(runs: dict[str, list[dict[str, float]]], given: argparse.Namespace) -> dict[str, Any]:
    """Medians of both, and of the ratios ours / peer run by run."""
    names = ("bundle", "gguf", "prompt_tokens", "new_tokens", "threads", "cpu", "runs")
    result: dict[str, Any] = {"conditions": {name: getattr(given, name) for name in names}}
    for which, rows in runs.items():
        if rows:
            result[which] = {
                name: statistics.median(row[name] for row in rows)
                for name in FIGURES
                if name in rows[0]
            }
    pairs = list(zip(runs["ours"], runs["peer"], strict=False))
    if pairs:
        result["ratios"] = {
            name: round(statistics.median(a[name] / b[name] for a, b in pairs), 3)
            for name in FIGURES
            if name in pairs[0][1]
        }
    return result


def ours(given: argparse.Namespace) -> dict[str, float]:
    """Load, prefill of a random prompt, greedy decode: runner and executor, without text."""
    import numpy as np

    from edgevlm.bundle import open_bundle
    from edgevlm.executors.host import HostExecutor
    from edgevlm.positions import plain_positions
    from edgevlm.runner import ModelRunner

    now = time.process_time if given.cpu else time.perf_counter
    start = now()
    bundle = open_bundle(given.bundle, check=False)
    executor = HostExecutor(bundle, given.threads)
    runner = ModelRunner(bundle, executor)
    load = now() - start
    inside = _time_inside(executor, now)
    ids = np.random.default_rng().integers(0, 1000, given.prompt_tokens)
    positions = plain_positions(len(ids))
    if runner.model.text.rope.scheme != "plain":
        positions = np.repeat(positions, 3, axis=0)
    slot = runner.slots[0]
    runner.prefill(slot, ids[:8], ids[:8], positions[:, :8], 0)
    start = now()
    logits = runner.prefill(slot, ids, ids, positions, 0)
    prefill = now() - start
    token = int(logits.argmax())
    inside[0] = 0.0
    start = now()
    for _ in range(given.new_tokens):
        token = int(runner.decode([(slot, token)])[0].argmax())
    decode = now() - start
    return {
        "load_s": round(load, 3),
        "prefill_tok_s": round(len(ids) / prefill, 2),
        "decode_tok_s": round(given.new_tokens / decode, 2),
        "python_ms_per_token": round((decode - inside[0]) / given.new_tokens * 1e3, 3),
        "peak_rss_bytes": peak(),
    }


def _time_inside(executor: Any, now: Callable[[], float]) -> list[float]:
    """Seconds spent in the executor's runs, kept up to date: the rest of a step is our Python."""
    run, inside = executor.run, [0.0]

    def timed(*args: Any, **dims: int) -> None:
        start = now()
        run(*args, **dims)
        inside[0] += now() - start

    executor.run = timed
    return inside


def peer(given: argparse.Namespace) -> dict[str, float]:
    """llama.cpp through xllamacpp; a first completion warms up."""
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = given.gguf
    params.n_ctx, params.n_parallel = given.prompt_tokens + given.new_tokens + 64, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    start = time.perf_counter()
    server = xllamacpp.Server(params)
    load = time.perf_counter() - start
    words = given.prompt_tokens - 12
    _complete(server, 4, 2)
    if given.cpu:  # its own timings are by the clock
        prompt, first = _complete(server, words, 1)
        _, whole = _complete(server, words, given.new_tokens + 1)
        prefill, decode = prompt["prompt_n"] / first, given.new_tokens / (whole - first)
    else:
        timings, _ = _complete(server, words, given.new_tokens)
        prefill, decode = timings["prompt_per_second"], timings["predicted_per_second"]
    return {
        "load_s": round(load, 3),
        "prefill_tok_s": round(prefill, 2),
        "decode_tok_s": round(decode, 2),
        "peak_rss_bytes": peak(),
    }


def _complete(server: Any, words: int, new_tokens: int) -> tuple[dict[str, float], float]:
    """llama.cpp's timings of one completion, and the processor seconds it took."""
    request = {
        "prompt": f"{time.time_ns()} " + "the " * words,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    start = time.process_time()
    answer = server.handle_completions(request)
    seconds = time.process_time() - start
    timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
    return timings, seconds


def peak() -> int:
    """The most memory this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
