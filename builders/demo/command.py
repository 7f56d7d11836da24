"""`edgevlm demo`: build the demo bundle if need be, ask it about pictures, measure it.

The bundle is keyed by what it was made from and how; when either changes it is built again.
"""

import argparse
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

from builders.build import BuildOptions, build
from builders.demo.scenes import Example, examples
from edgevlm import __version__
from edgevlm.bundle import Bundle, open_bundle
from edgevlm.commands.plan_report import print_limits, print_plan
from edgevlm.commands.progress import BuildProgress
from edgevlm.commands.terminal import terminal
from edgevlm.config import to_dict
from edgevlm.errors import BuildError, BundleError
from edgevlm.sampling import SamplingParams
from edgevlm.vlm import VLM

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoint"
PICTURES = HERE / "pictures"
QUESTIONS = HERE / "pictures.json"
GREEDY = SamplingParams(temperature=0, max_tokens=48)


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """The whole demo."""
    console = terminal(quiet=args.json)
    path = args.dir or Path("bundles") / f"demo-{args.weights}"
    bundle = demo_bundle(path, BuildOptions(weights=args.weights, force=True), force=args.force)
    print_plan(console, bundle.manifest.plan)
    print_limits(console, bundle.manifest.plan)
    with VLM(path, threads=args.threads) as vlm:
        answers = list(_answers(vlm))
        console.print()
        console.print(_answers_table(answers))
        document: dict[str, Any] = {"bundle": str(path), "answers": answers}
        if args.eval:
            document |= evaluate(vlm, args.seed, args.eval)
            console.print()
            console.print(_accuracy_table(document))
        document["allocations_after_start"] = vlm.allocations_after_start
    console.print(f"\nYour turn: edgevlm chat {path}")
    return document


def demo_bundle(path: Path, options: BuildOptions, *, force: bool = False) -> Bundle:
    """The bundle at `path`, built again only where it is not the one that these inputs give."""
    if not CHECKPOINT.is_dir():
        raise BuildError(f"the demo checkpoint is missing: {CHECKPOINT} is not there")
    key, key_file = _key(options), path.parent / f".{path.name}.key"
    if not force and key_file.is_file() and key_file.read_text(encoding="utf-8") == key:
        try:
            return open_bundle(path)
        except BundleError as error:
            print(f"{error}; building it again", file=sys.stderr)
    path.parent.mkdir(parents=True, exist_ok=True)
    key_file.unlink(missing_ok=True)
    with BuildProgress() as progress:
        bundle = build(CHECKPOINT, path, options, progress=progress)
    key_file.write_text(key, encoding="utf-8")
    return bundle


def _key(options: BuildOptions) -> str:
    digest = hashlib.sha256()
    digest.update(json.dumps([__version__, to_dict(options)]).encode())
    for file in sorted(p for p in CHECKPOINT.iterdir() if p.is_file()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _answers(vlm: VLM) -> Iterator[dict[str, Any]]:
    """Ask what the shipped pictures come with: [{image: name or names, question, answer}].

    An entry may have `questions: [{question, answer}]` instead, about the same picture.
    """
    for entry in json.loads(QUESTIONS.read_text(encoding="utf-8")):
        names = [entry["image"]] if isinstance(entry["image"], str) else entry["image"]
        for asked in entry.get("questions", [entry]):
            images = [PICTURES / name for name in names]
            result = vlm.generate(asked["question"], images, GREEDY)
            yield {
                "image": ", ".join(str(image) for image in images),
                "question": asked["question"],
                "answer": result.text.strip(),
                "expected": asked["answer"],
            }


def evaluate(vlm: VLM, seed: int, count: int) -> dict[str, Any]:
    """Exact-match accuracy on fresh scenes, in total and by kind."""
    right: dict[str, list[bool]] = defaultdict(list)
    console = terminal(stderr=True, quiet=not sys.stderr.isatty())
    drawn: Iterator[Example] = examples(seed, count)
    for example in track(drawn, "asking about fresh scenes", total=count, console=console):
        result = vlm.generate(example.question, list(example.images), GREEDY)
        right[example.kind].append(result.text.strip() == example.answer)
    every = [ok for results in right.values() for ok in results]
    return {
        "accuracy": round(sum(every) / len(every), 4),
        "by_kind": {k: round(sum(v) / len(v), 4) for k, v in sorted(right.items())},
        "counts": {k: len(v) for k, v in sorted(right.items())},
    }


def _answers_table(answers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, title="answers", title_justify="left")
    table.add_column("picture", no_wrap=True)
    table.add_column("question", overflow="fold")
    table.add_column("answer", overflow="fold")
    table.add_column("expected", overflow="fold")
    table.add_column("")
    for entry in answers:
        right = entry["answer"] == entry["expected"]
        table.add_row(
            ", ".join(Path(image).name for image in entry["image"].split(", ")),
            entry["question"],
            entry["answer"],
            entry["expected"],
            "ok" if right else "WRONG",
            style=None if right else "red",
        )
    return table


def _accuracy_table(document: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, title="fresh scenes", title_justify="left")
    table.add_column("kind")
    table.add_column("right", justify="right")
    table.add_column("of", justify="right")
    for kind, accuracy in document["by_kind"].items():
        table.add_row(kind, f"{accuracy:.1%}", str(document["counts"][kind]))
    total = sum(document["counts"].values())
    table.add_row("all", f"{document['accuracy']:.1%}", str(total), style="bold")
    return table
