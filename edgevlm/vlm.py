"""The Python API: a bundle in memory, questions in, answers out.

`prepare` checks and decodes, `submit` queues, an `Answer` yields text; `stream` is the two in one,
`generate` waits for the end. What runs when is the scheduler's business.
"""

import importlib
import resource
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from edgevlm.answer import Answer, Mailbox
from edgevlm.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle, open_bundle
from edgevlm.chat_template import ChatTemplate
from edgevlm.checks import check_start
from edgevlm.device import Machine
from edgevlm.errors import BadParameter, Cancelled, ExecutorError, PromptTooLong, TooManyImages
from edgevlm.executors.base import Executor
from edgevlm.generation import Generation, TextAssembly
from edgevlm.images import ImageSource, OpenImage, decode, image_digest
from edgevlm.preprocess import resize_image
from edgevlm.prompt import Messages, Prompt, PromptBuilder
from edgevlm.request import Request
from edgevlm.runner import ModelRunner
from edgevlm.sampling import Constraint, Sampler, SamplingParams
from edgevlm.scheduler import Scheduler
from edgevlm.sequence import RunningRequest
from edgevlm.stats import Observer, Stats
from edgevlm.tokenizer import Tokenizer

EXECUTORS = {
    "host": ("edgevlm.executors.host", "HostExecutor"),
    "tensorrt": ("edgevlm.executors.tensorrt", "TensorRTExecutor"),
    "tensorrt-rtx": ("edgevlm.executors.tensorrt", "TensorRTRTXExecutor"),
}
EXTRAS = {
    "host": "'edgevlm[host]'",
    "tensorrt": "'edgevlm[jetson6]' or 'edgevlm[jetson7]', by the board's JetPack",
    "tensorrt-rtx": "'edgevlm[rtx]'",
}


class VLM:
    """A model, loaded. Safe to use from any thread; its scheduler's thread alone runs it."""

    def __init__(
        self,
        path: str | Path,
        *,
        executor: str | None = None,
        threads: int | None = None,
        check: bool = True,
        machine: Machine | None = None,
        max_queue: int = 32,
    ) -> None:
        """Load a bundle. `executor` None: the one it was built for; `threads` None: every core.

        `check=False` skips the SHA-256 of its files. `machine` None: this one. `max_queue`: how
        many requests may wait beyond those that have a slot.
        Raises BundleError, ExecutorError.
        """
        start = time.perf_counter()
        self.bundle: Bundle = open_bundle(path, check=check)
        manifest = self.bundle.manifest
        check_start(manifest, machine)
        self._tokenizer, self._prompts = _text_side(self.bundle)
        self._executor = make_executor(self.bundle, executor, threads)
        self._runner = ModelRunner(self.bundle, self._executor)
        self._limits = manifest.limits
        self._eos = frozenset(manifest.model.generation.eos_token_ids)
        self._scheduler = Scheduler(
            self._runner,
            max_queue=max_queue,
            memory=partial(_memory, manifest.plan.total_bytes, self._executor),
        )
        # A VLM that is dropped, or open when Python ends, is closed all the same.
        weakref.finalize(self, self._scheduler.close)
        self.load_ms = _since(start)

    def __enter__(self) -> "VLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def stream(
        self,
        prompt: str | Messages,
        images: Sequence[ImageSource] = (),
        params: SamplingParams | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """Answer piece by piece; an iterator, and to close it is to cancel.

        `prompt` is a question or messages as OpenAI writes them; `images` fill their
        `{"type": "image"}` parts in order, or stand before a plain question. What is wrong with
        the request is raised here, before anything runs (RequestError); BusyError when as many as
        may wait are waiting.
        """
        return self.submit(self.prepare(prompt, images, params), deadline=deadline)

    def generate(
        self,
        prompt: str | Messages,
        images: Sequence[ImageSource] = (),
        params: SamplingParams | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """The whole answer. Arguments and errors as `stream`."""
        return self.stream(prompt, images, params, deadline).result()

    def prepare(
        self,
        prompt: str | Messages,
        images: Sequence["ImageSource | OpenImage"] = (),
        params: SamplingParams | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Request:
        """Check a request and decode its pictures, in the caller's thread. Raises RequestError.

        What can be refused is refused by headers, before a pixel is decoded. `variables` go to
        the chat template (`tools`, ...). `cancelled` is asked before each picture: true raises
        Cancelled.
        """
        start = time.perf_counter()
        self._scheduler.check_open()
        built = self._prompts.build(prompt, images, variables=variables)
        return self._prepared(built, params, start, cancelled or (lambda: False))

    def prepare_text(self, text: str, params: SamplingParams | None = None) -> Request:
        """The same for raw text, which no chat template frames."""
        start = time.perf_counter()
        self._scheduler.check_open()
        return self._prepared(self._prompts.build_text(text), params, start, lambda: False)

    def submit(
        self,
        request: Request,
        *,
        deadline: float | None = None,
        notify: Callable[[], object] | None = None,
        constraint: Constraint | None = None,
    ) -> Answer:
        """Queue a request; one request may be submitted several times.

        `deadline`: seconds from now. `notify` is called from the scheduler's thread, and must not
        block, whenever something can be taken from the answer. Raises BusyError, ShuttingDown.
        """
        if deadline is not None and not deadline > 0:
            raise BadParameter(f"deadline is {deadline!r}; it must be above 0 seconds")
        model = self.bundle.manifest.model
        tokens = model.image_tokens
        sampler = Sampler(
            request.params,
            model.generation,
            request.prompt.ids,
            self._tokenizer.vocab_size,
            None if tokens is None else tokens.image,
        )
        mailbox = Mailbox(notify)
        sequence = RunningRequest(
            request,
            sampler,
            TextAssembly(self._tokenizer, request.params),
            mailbox,
            eos=self._eos,
            constraint=constraint,
            deadline=deadline,
            load_ms=self.load_ms,
        )
        self._scheduler.submit(sequence)
        return Answer(request, mailbox)

    def observe(self, observer: Observer) -> None:
        """Have `observer(name, seconds)` called for every latency, from the scheduler's thread."""
        self._scheduler.observe(observer)

    def stats(self) -> Stats:
        """What was done since the start, and what is being done now."""
        return self._scheduler.stats()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's: text to ids and back."""
        return self._tokenizer

    @property
    def allocations_after_start(self) -> int:
        """How often memory was asked for after start; it must stay 0."""
        return self._executor.allocations_after_start

    def drain(self, grace: float) -> None:
        """Take no new requests; give those that are there `grace` seconds, then close.

        What is not finished by then ends with ShuttingDown.
        """
        self._scheduler.drain(grace)

    def close(self) -> None:
        """Give the memory back. Safe to call twice; what still runs ends with ExecutorError."""
        self._scheduler.close()

    def _prepared(
        self,
        built: Prompt,
        params: SamplingParams | None,
        start: float,
        cancelled: Callable[[], bool],
    ) -> Request:
        params = params or SamplingParams()
        room = self._room(built)
        processor = self.bundle.manifest.model.image_processor
        pictures = []
        for image in built.images:
            if cancelled():
                raise Cancelled("the request was cancelled before its pictures were decoded")
            assert processor is not None
            pictures.append(resize_image(decode(image), processor))
        digests = tuple(image_digest(picture) for picture in pictures)
        return Request(
            prompt=built,
            pictures=tuple(pictures),
            digests=digests,
            keys=built.keys(digests),
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            preprocess_ms=_since(start),
        )

    def _room(self, prompt: Prompt) -> int:
        """How many tokens may be generated after a prompt. Raises RequestError."""
        limits = self._limits
        if len(prompt.images) > limits.max_images:
            raise TooManyImages(
                f"the request has {len(prompt.images)} images; this bundle was built for "
                f"{limits.max_images}; send fewer or rebuild with --max-images"
            )
        room = limits.max_seq_len - len(prompt.ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(prompt.ids):,} tokens ({prompt.image_tokens:,} of them for "
                f"images) and needs room for an answer; this bundle was built for "
                f"{limits.max_seq_len:,}; shorten it or rebuild with --max-seq-len"
            )
        return room


def _memory(planned: int, executor: Executor) -> dict[str, int]:
    return {
        "planned_bytes": planned,
        "peak_rss_bytes": peak_rss_bytes(),
        "allocations_after_start": executor.allocations_after_start,
    }


def peak_rss_bytes() -> int:
    """The most memory this process has had resident.

    Not getrusage's figure where it can be helped: that one begins with the parent's at the fork.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def _since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


def _text_side(bundle: Bundle) -> tuple[Tokenizer, PromptBuilder]:
    model = bundle.manifest.model
    tokens = model.image_tokens
    protected = () if tokens is None else (tokens.image, tokens.vision_start, tokens.vision_end)
    tokenizer = Tokenizer.from_file(bundle.file(TOKENIZER), protected)
    path = bundle.file(CHAT_TEMPLATE)
    template = None
    if path.is_file():
        source = path.read_text(encoding="utf-8")
        template = ChatTemplate(source, bundle.manifest.special_tokens)
    return tokenizer, PromptBuilder(model, tokenizer, template)


def make_executor(bundle: Bundle, name: str | None, threads: int | None) -> Executor:
    """The executor a bundle was built for. Raises ExecutorError."""
    built_for = bundle.manifest.executor
    name = name or built_for
    if name not in EXECUTORS:
        raise ExecutorError(
            f"this edgevlm has no executor {name!r} to run {bundle.path} with; it has "
            f"{', '.join(EXECUTORS)}; build the checkpoint with --target host to run it here"
        )
    if name != built_for:
        raise ExecutorError(
            f"{bundle.path} was built for the executor {built_for!r} and cannot run on {name!r}; "
            "build it again for that target"
        )
    module, attribute = EXECUTORS[name]
    try:
        make = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ExecutorError(
            f"the executor {name!r} needs a library that is missing ({error}); "
            f"pip install {EXTRAS[name]}"
        ) from error
    executor: Executor = make(bundle, threads)
    return executor
