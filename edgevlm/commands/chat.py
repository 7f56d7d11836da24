"""`edgevlm chat`: a conversation in the terminal. Commands begin with a slash."""

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from edgevlm.commands.request import (
    Echo,
    conversation,
    sampling_params,
    speed_line,
    user_message,
)
from edgevlm.errors import EdgeVLMError, RequestError
from edgevlm.generation import Generation
from edgevlm.images import open_image
from edgevlm.sampling import SamplingParams
from edgevlm.vlm import VLM

HELP = """\
/image FILE    show this picture with the next message (may be repeated)
/system TEXT   begin again with this system message
/reset         begin again
/stats         tokens and times of the last answer
/quit          leave (so does Ctrl-D); Ctrl-C stops an answer"""


@dataclass
class Chat:
    """A conversation: what was said, what was shown, and what waits for the next message."""

    vlm: VLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    last: Generation | None = None

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = conversation(self.system)
        self.images, self.waiting = [], []

    def answer(self, text: str) -> None:
        """Say something and print what comes back. A refused message leaves no trace."""
        messages = [*self.messages, user_message(text, len(self.waiting))]
        images = [*self.images, *self.waiting]
        self.waiting = []
        echo = Echo()
        try:
            self.last = echo(self.vlm.stream(messages, images, self.params))
            print()
        except KeyboardInterrupt:
            print("\n(stopped)")
        self.messages = [*messages, {"role": "assistant", "content": echo.text}]
        self.images = images

    def command(self, line: str) -> None:
        """Carry out a line that begins with a slash, /quit aside."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/image" and rest:
            self._show(os.path.expanduser(rest.strip("'\"")))
        elif name == "/system" and rest:
            self.system = rest
            self.reset()
            print("(begun again)")
        elif name == "/reset":
            self.reset()
            print("(begun again)")
        elif name == "/stats":
            self._print_stats()
        else:
            print(HELP)

    def _show(self, path: str) -> None:
        width, height = open_image(path).size
        self.waiting.append(path)
        print(f"({path}, {width}x{height}, goes with your next message)")

    def _print_stats(self) -> None:
        if self.last is None:
            print("(nothing was answered yet)")
            return
        used = self.last.usage["prompt_tokens"] + self.last.usage["completion_tokens"]
        limit = self.vlm.bundle.manifest.limits.max_seq_len
        memory = self.last.memory
        print(speed_line(self.last))
        print(f"{used:,} of {limit:,} tokens used, {len(self.images)} pictures")
        print(f"allocations after start: {memory['allocations_after_start']}")


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """Talk until the user leaves."""
    params = sampling_params(args)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() edits lines and remembers them once it is there
    interactive = sys.stdin.isatty()
    with VLM(args.bundle, executor=args.executor, threads=args.threads) as vlm:
        chat = Chat(vlm, params, args.system)
        chat.reset()
        if interactive:
            print(f"{args.bundle}: {vlm.bundle.manifest.model.model_type}. /help shows commands.")
        _talk(chat, "> " if interactive else "")
    return {}


def _talk(chat: Chat, prompt: str) -> None:
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)")
            continue
        if line in ("/quit", "/exit"):
            return
        try:
            if line.startswith("/"):
                chat.command(line)
            elif line:
                chat.answer(line)
        except RequestError as error:
            _say_error(error)


def _say_error(error: EdgeVLMError) -> None:
    print(f"error: {error}", file=sys.stderr)
