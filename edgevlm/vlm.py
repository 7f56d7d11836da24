"""The Python API: a bundle in memory, questions in, answers out.

Floors: `_tokens` yields ids, `stream` yields text, `generate` joins it. One request per slot; a
request that runs holds the executor for one image, one prefill or one token at a time.
"""

import dataclasses
import importlib
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgevlm.bundle import CHAT_TEMPLATE, TOKENIZER, Bundle, open_bundle
from edgevlm.chat_template import ChatTemplate
from edgevlm.checks import check_start
from edgevlm.device import Machine
from edgevlm.errors import BusyError, ExecutorError, PromptTooLong, TooManyImages
from edgevlm.executors.base import Executor
from edgevlm.generation import Delta, FinishReason, Generation, TextAssembly
from edgevlm.images import ImageSource, decode, image_digest
from edgevlm.preprocess import resize_image
from edgevlm.prompt import Messages, Prompt, PromptBuilder
from edgevlm.runner import ModelRunner, Slot
from edgevlm.sampling import Sampler, SamplingParams, TokenLogprobs
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


@dataclass
class _Request:
    """A request that was found to be possible; `pictures` are resized already."""

    prompt: Prompt
    pictures: list[Image.Image]
    keys: NDArray[np.int64]
    params: SamplingParams
    max_tokens: int
    sampler: Sampler
    start: float
    timings: dict[str, float]
    cached: int = 0


class VLM:
    """A model, loaded. Safe to use from several threads; each running answer takes one slot."""

    def __init__(
        self,
        path: str | Path,
        *,
        executor: str | None = None,
        threads: int | None = None,
        check: bool = True,
        machine: Machine | None = None,
    ) -> None:
        """Load a bundle. `executor` None: the one it was built for; `threads` None: every core.

        `check=False` skips the SHA-256 of its files. `machine` None: this one.
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
        self._lock = threading.Lock()
        self._closed = False
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
    ) -> Iterator[Delta]:
        """Answer piece by piece.

        `prompt` is a question or messages as OpenAI writes them; `images` fill their
        `{"type": "image"}` parts in order, or stand before a plain question. What is wrong with
        the request is raised here, before anything runs (RequestError); BusyError when every
        slot is taken.
        """
        request = self._prepare(prompt, images, params or SamplingParams())
        return self._stream(request)

    def generate(
        self,
        prompt: str | Messages,
        images: Sequence[ImageSource] = (),
        params: SamplingParams | None = None,
    ) -> Generation:
        """The whole answer. Arguments and errors as `stream`."""
        generation = None
        for delta in self.stream(prompt, images, params):
            generation = delta.generation
        assert generation is not None, "a stream ends with its generation"
        return generation

    @property
    def allocations_after_start(self) -> int:
        """How often memory was asked for after start; it must stay 0."""
        return self._executor.allocations_after_start

    def close(self) -> None:
        """Give the memory back. Safe to call twice; a running stream ends with ExecutorError."""
        with self._lock:
            self._closed = True
            self._executor.close()

    def _prepare(
        self,
        prompt: str | Messages,
        images: Sequence[ImageSource],
        params: SamplingParams,
    ) -> _Request:
        """Everything that can be refused is refused here, by headers before pixels."""
        start = time.perf_counter()
        self._check_open()
        model = self.bundle.manifest.model
        built = self._prompts.build(prompt, images)
        room = self._room(built)
        tokens = model.image_tokens
        sampler = Sampler(
            params,
            model.generation,
            built.ids,
            self._tokenizer.vocab_size,
            None if tokens is None else tokens.image,
        )
        pictures = []
        for image in built.images:
            assert model.image_processor is not None
            pictures.append(resize_image(decode(image), model.image_processor))
        return _Request(
            prompt=built,
            pictures=pictures,
            keys=built.keys([image_digest(picture) for picture in pictures]),
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            sampler=sampler,
            start=start,
            timings={"load_ms": self.load_ms, "preprocess_ms": _since(start)},
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

    def _stream(self, request: _Request) -> Iterator[Delta]:
        text = TextAssembly(self._tokenizer, request.params)
        for token, logprobs, ended in self._tokens(request):
            delta = text.push(token, logprobs, ended)
            if delta.finish_reason is not None:
                yield self._finish(request, text, delta)
                return
            yield delta

    def _tokens(
        self, request: _Request
    ) -> Iterator[tuple[int, TokenLogprobs | None, FinishReason | None]]:
        """(id, its logprobs, why it is the last); holds a slot while it runs."""
        slot = self._acquire(request)
        eos = set(self.bundle.manifest.model.generation.eos_token_ids)
        timings = request.timings
        decode_start = 0.0
        try:
            logits = self._prefill(slot, request)
            token, logprobs = request.sampler.sample(logits)
            timings["first_token_ms"] = _since(request.start)
            decode_start = time.perf_counter()
            for count in range(1, request.max_tokens + 1):
                ended: FinishReason | None = None
                if token in eos and not request.params.ignore_eos:
                    ended = "stop"
                elif count == request.max_tokens:
                    ended = "length"
                timings["decode_ms"] = _since(decode_start)
                yield token, logprobs, ended
                if ended is not None:
                    return
                with self._lock:
                    self._check_open()
                    logits = self._runner.decode([(slot, token)])[slot.index]
                    token, logprobs = request.sampler.sample(logits)
        except ExecutorError:
            slot.length = 0  # what lies in its cache may be what went wrong
            raise
        finally:
            slot.busy = False

    def _acquire(self, request: _Request) -> Slot:
        """The free slot that remembers most of this prompt."""
        keys = request.keys
        with self._lock:
            self._check_open()
            free = [slot for slot in self._runner.slots if not slot.busy]
            if not free:
                raise BusyError(
                    f"all {self._limits.slots} slots are in use; let an answer end first, or build "
                    "with more --slots"
                )
            slot = max(free, key=lambda s: (s.common_prefix(keys), -s.length))
            slot.busy = True
            return slot

    def _prefill(self, slot: Slot, request: _Request) -> NDArray[np.float32]:
        """Images and prompt into the cache, from where it differs; logits of the last token."""
        prompt, timings = request.prompt, request.timings
        with self._lock:
            self._check_open()
            cached = min(slot.common_prefix(request.keys), len(prompt.ids) - 1)
            for run in prompt.image_runs:
                if run.start < cached < run.start + run.length:
                    cached = run.start  # half a picture is no use: its rows come all at once
            request.cached = cached
            # From here on the slot remembers only what stays true if this fails.
            slot.length = cached
            start = time.perf_counter()
            image_rows = np.zeros(len(prompt.ids), np.bool_)
            for run in prompt.image_runs:
                image_rows[run.start : run.start + run.length] = True
                if run.start >= cached:
                    picture, grid = request.pictures[run.image], prompt.grids[run.image]
                    self._runner.encode_image(picture, grid, run.start)
            timings["vision_ms"] = _since(start)
            start = time.perf_counter()
            logits = self._runner.prefill(
                slot, prompt.ids, request.keys, prompt.positions, cached, image_rows
            )
            timings["prefill_ms"] = _since(start)
            return logits.copy()

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutorError("this VLM is closed; open the bundle again")

    def _finish(self, request: _Request, text: TextAssembly, last: Delta) -> Delta:
        """The last delta, with the whole answer."""
        assert last.finish_reason is not None
        manifest = self.bundle.manifest
        prompt_tokens = len(request.prompt.ids)
        generation = Generation(
            text=text.text,
            token_ids=text.token_ids,
            logprobs=text.logprobs,
            finish_reason=last.finish_reason,
            usage={
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(text.token_ids),
                "image_tokens": request.prompt.image_tokens,
                "cached_tokens": request.cached,
                "images": [
                    {"original": list(image.size), "used": list(picture.size), "tokens": run.length}
                    for image, picture, run in zip(
                        request.prompt.images,
                        request.pictures,
                        request.prompt.image_runs,
                        strict=True,
                    )
                ],
            },
            timings={name: round(ms, 3) for name, ms in request.timings.items()},
            memory={
                "planned_bytes": manifest.plan.total_bytes,
                "peak_rss_bytes": peak_rss_bytes(),
                "allocations_after_start": self.allocations_after_start,
            },
        )
        return dataclasses.replace(last, generation=generation)


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
