"""`edgevlm run`: one question, one answer."""

import argparse
import sys
from typing import Any

from edgevlm.commands.request import (
    Echo,
    conversation,
    sampling_params,
    speed_line,
    user_message,
)
from edgevlm.config import to_dict
from edgevlm.errors import BadParameter
from edgevlm.vlm import VLM


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """Answer, streaming to the terminal unless a document was asked for."""
    params = sampling_params(args)
    question = sys.stdin.read().strip() if args.question == "-" else args.question
    if not question and not args.image:
        raise BadParameter("the question is empty; write one, or give a picture with --image")
    messages = [*conversation(args.system), user_message(question, len(args.image))]
    with VLM(args.bundle, executor=args.executor, threads=args.threads) as vlm:
        if args.json:
            return _document(vlm.generate(messages, args.image, params))
        generation = Echo()(vlm.stream(messages, args.image, params))
    print()
    if generation.finish_reason == "length":
        limit = f"after {len(generation.token_ids)} tokens, before the model ended"
        print(f"(stopped {limit})", file=sys.stderr)
    if sys.stderr.isatty():
        print(f"({speed_line(generation)})", file=sys.stderr)
    return _document(generation)


def _document(generation: Any) -> dict[str, Any]:
    document: dict[str, Any] = to_dict(generation)
    return document
