"""The `edgevlm` command: finds the sub-command, prints its document, turns errors into one line.

Sub-commands are named in a table of strings and imported when they are asked for, so that help is
quick and a board needs no builders.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgevlm import __version__
from edgevlm.commands.refusal import Refused
from edgevlm.errors import EdgeVLMError

OK, FAILED, USAGE = 0, 1, 2
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + the signal, as a shell says it


@dataclass(frozen=True)
class Command:
    """A sub-command: `arguments(parser)` declares it, `execute(args)` gives its JSON document."""

    summary: str
    arguments: str  # "module:function"
    execute: str


COMMANDS = {
    "demo": Command(
        "build the demo bundle and answer questions about pictures",
        "builders.demo.arguments:demo",
        "builders.demo.command:execute",
    ),
    "plan": Command(
        "say whether a model fits a device, from its config alone",
        "builders.plan_arguments:plan",
        "builders.plan_command:execute",
    ),
    "build": Command(
        "make a bundle from a Hugging Face checkpoint",
        "builders.cli:arguments",
        "builders.cli:execute",
    ),
    "compile": Command(
        "finish on the board a bundle that was prepared elsewhere",
        "builders.compile:arguments",
        "builders.compile:execute",
    ),
    "verify": Command(
        "hold a bundle against its checkpoint's own answers",
        "edgevlm.commands.arguments:verify",
        "edgevlm.commands.verify:execute",
    ),
    "run": Command(
        "ask a bundle one question",
        "edgevlm.commands.arguments:run",
        "edgevlm.commands.run:execute",
    ),
    "chat": Command(
        "talk with a bundle, with pictures",
        "edgevlm.commands.arguments:chat",
        "edgevlm.commands.chat:execute",
    ),
    "serve": Command(
        "put a bundle behind OpenAI's API",
        "edgevlm.commands.arguments:serve",
        "edgevlm.commands.serve:execute",
    ),
    "inspect": Command(
        "show a bundle's memory plan, limits and build report",
        "edgevlm.commands.arguments:inspect",
        "edgevlm.commands.inspect:execute",
    ),
    "doctor": Command(
        "say what this machine is, and what it lacks",
        "edgevlm.commands.arguments:doctor",
        "edgevlm.commands.doctor:execute",
    ),
    "bench": Command(
        "time a bundle on this machine",
        "edgevlm.commands.arguments:bench",
        "edgevlm.commands.bench:execute",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no emoji gets a "?"
    try:
        return _main(words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read us is gone; keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _main(words: list[str]) -> int:
    name = words[0] if words else ""
    if name not in COMMANDS:
        parser = _overview()
        if not words:
            parser.print_help(sys.stderr)
            return USAGE
        parser.parse_args(words)  # --help, --version, or an error: each leaves here
        return USAGE
    debug = "--debug" in words
    try:
        return _run_command(name, words[1:])
    except EdgeVLMError as error:
        return _fail(str(error), debug)
    except BrokenPipeError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        hint = "" if debug else " (this is a bug in edgevlm; --debug shows where)"
        return _fail(text + hint, debug)


def _run_command(name: str, words: list[str]) -> int:
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(f"edgevlm {name}", description=_sentence(command.summary))
    _load(command.arguments)(parser)
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    args = parser.parse_args(words)
    if not getattr(args, "json", False):
        _load(command.execute)(args)
        sys.stdout.flush()
        return OK
    try:
        with _stdout_kept_for_the_document():
            document = _load(command.execute)(args)
    except Refused as error:
        _print_json(error.document)
        raise
    _print_json(document)
    return OK


def _print_json(document: Any) -> None:
    # Strict JSON: a NaN would be a bug, and no other parser could read it.
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False), flush=True)


def _load(place: str) -> Any:
    """The function at "module:function". Raises EdgeVLMError where its house is not installed."""
    module, _, function = place.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("edgevlm", ""):
            raise
        if missing == "builders":
            raise EdgeVLMError(
                "this command needs the builders, and only the runtime is installed; "
                "run it from a clone of the project after `pip install -e '.[host,build]'`"
            ) from error
        raise EdgeVLMError(
            f"this command needs the Python package {missing!r}, which is not installed; "
            "install edgevlm with the extra [host] to run bundles, [server] to serve them, "
            "[build] to make them"
        ) from error


@contextlib.contextmanager
def _stdout_kept_for_the_document() -> Iterator[None]:
    """Send what anybody prints, also C++ libraries and child processes, to stderr meanwhile."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # started with a closed stdout or stderr: nothing to keep clean
        yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def _fail(text: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return FAILED


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "edgevlm",
        description="Vision-language models on small machines, in memory planned beforehand.",
        epilog="`edgevlm COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"edgevlm {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    return parser


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


if __name__ == "__main__":
    sys.exit(main())
