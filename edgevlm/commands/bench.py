"""`edgevlm bench`: what this bundle does on this machine.

Every prompt is new from its first word, so that nothing is served from a cache; the end token is
ignored, so that every run generates as much; one run to warm up is not counted.
"""

import argparse
import random
import statistics
import time
from typing import Any

from numpy.typing import NDArray
from PIL import Image
from rich.table import Table

from edgevlm.bundle import TOKENIZER, PhaseName
from edgevlm.commands.terminal import terminal
from edgevlm.errors import BadParameter
from edgevlm.executors.base import Executor
from edgevlm.generation import Generation
from edgevlm.images import decode, open_image
from edgevlm.sampling import SamplingParams
from edgevlm.tokenizer import Tokenizer
from edgevlm.vlm import VLM

WORDS = "time year people way day man thing woman life child world school state family".split()
WARM_UP_TOKENS = 4


class TimedExecutor:
    """Passes everything on and adds up our own work between decode steps.

    In CPU time of the calling thread, the scheduler's, so that other programs on the machine do
    not count.
    """

    allocations_after_start = 0  # the one inside counts

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._left = time.thread_time()
        self.decode_steps = 0
        self.python_seconds = 0.0

    def staging(self, name: str, rows: int, start: int = 0) -> NDArray[Any]:
        """Preparing input is our own work."""
        return self._inner.staging(name, rows, start)

    def write(self, name: str, array: NDArray[Any], start: int = 0) -> None:
        """Preparing input is our own work."""
        self._inner.write(name, array, start)

    def run(self, phase: PhaseName, *, stage: int | None = None, **dims: int) -> None:
        """What passed since the last call returned was ours."""
        if phase == "decode":
            self.decode_steps += 1
            self.python_seconds += time.thread_time() - self._left
        self._inner.run(phase, stage=stage, **dims)
        self._left = time.thread_time()

    def copy(self, source: str, row: int, target: str, target_row: int, rows: int) -> None:
        """Part of taking a prompt in."""
        self._inner.copy(source, row, target, target_row, rows)

    def read(self, name: str) -> NDArray[Any]:
        """It may wait for the run: not ours."""
        result = self._inner.read(name)
        self._left = time.thread_time()
        return result

    def close(self) -> None:
        """Close it."""
        self._inner.close()


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, and print the medians."""
    picture = None if args.image is None else decode(open_image(args.image))
    with VLM(args.bundle, executor=args.executor, threads=args.threads) as vlm:
        # The only reach below the API: how much of a token's time is our own Python.
        timed = TimedExecutor(vlm._runner.executor)
        vlm._runner.executor = timed
        tokenizer = Tokenizer.from_file(vlm.bundle.file(TOKENIZER))
        rng = random.Random()
        _ask(vlm, _prompt(rng, tokenizer, args.prompt_tokens), _fresh(rng, picture), WARM_UP_TOKENS)
        runs = []
        for _ in range(args.runs):
            prompt = _prompt(rng, tokenizer, args.prompt_tokens)
            timed.decode_steps, timed.python_seconds = 0, 0.0
            generation = _ask(vlm, prompt, _fresh(rng, picture), args.new_tokens)
            python_ms = timed.python_seconds * 1e3 / max(timed.decode_steps, 1)
            runs.append({**_figures(generation), "python_ms_per_token": round(python_ms, 3)})
        document = {
            "bundle": str(args.bundle),
            "threads": args.threads,
            **_medians(runs),
            "load_s": round(vlm.load_ms / 1e3, 3),
            "peak_rss_bytes": generation.memory["peak_rss_bytes"],
            "planned_bytes": generation.memory["planned_bytes"],
            "allocations_after_start": vlm.allocations_after_start,
            "runs": runs,
        }
    if not args.json:
        _print(document)
    return document


def _ask(vlm: VLM, prompt: str, images: list[Image.Image], new_tokens: int) -> Generation:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    # The words come first of all, as the system message, so that no earlier prompt begins alike.
    user = [*({"type": "image"} for _ in images), {"type": "text", "text": "Go on."}]
    content: Any = user if images else "Go on."
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": content}]
    generation = vlm.generate(messages, images, params)
    if generation.usage["completion_tokens"] < new_tokens:
        raise BadParameter(
            f"the bundle has room for {generation.usage['completion_tokens']} new tokens after a "
            f"prompt of {generation.usage['prompt_tokens']}, not {new_tokens}; lower "
            "--prompt-tokens or --new-tokens"
        )
    return generation


def _prompt(rng: random.Random, tokenizer: Tokenizer, tokens: int) -> str:
    """Random words that make so many tokens."""
    words = [str(rng.randrange(10**6))]
    while (missing := tokens - len(tokenizer.encode(" ".join(words)))) > 0:
        # A word is one token or more: never add so many that the aim is passed by much.
        words += rng.choices(WORDS, k=max(1, missing // 8))
    return " ".join(words)


def _fresh(rng: random.Random, picture: Image.Image | None) -> list[Image.Image]:
    """The picture with one pixel changed: as much work, and in no cache."""
    if picture is None:
        return []
    changed = picture.copy()
    changed.putpixel((0, 0), (rng.randrange(256), rng.randrange(256), rng.randrange(256)))
    return [changed]


def _figures(generation: Generation) -> dict[str, float]:
    usage, timings = generation.usage, generation.timings
    computed = usage["prompt_tokens"] - usage["cached_tokens"]
    steps = usage["completion_tokens"] - 1  # the first token comes out of prefill
    figures = {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["cached_tokens"],
        "new_tokens": usage["completion_tokens"],
        "prefill_tok_s": computed * 1e3 / timings["prefill_ms"],
        "decode_tok_s": steps * 1e3 / timings["decode_ms"] if steps else 0.0,
        "vision_ms": timings["vision_ms"],
        "preprocess_ms": timings["preprocess_ms"],
        "first_token_ms": timings["first_token_ms"],
    }
    return {name: round(value, 3) for name, value in figures.items()}


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}


def _print(document: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, title=str(document["bundle"]), title_justify="left")
    table.add_column("median")
    table.add_column("value", justify="right")
    for name, value in document.items():
        if isinstance(value, int | float):
            table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    terminal().print(table)
