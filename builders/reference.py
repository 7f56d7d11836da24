"""What `edgevlm verify` holds a bundle against: fixed prompts, and the checkpoint's own logits.

The logits come from bundles in float32 for the host, that live in the build directory for as long
as it takes to run them once in a process of their own: one with the checkpoint's weights and, for
INT4, one with what the codes stand for. They are run stage by stage, so that no process of a build
needs the checkpoint's size. Where they do not fit, the prompts are kept alone and with the reason.
"""

import importlib.util
import io
import json
import math
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from builders.blocks import WeightPolicy
from builders.decoder import GraphFile, TextPart, text_graph, write_embedding_table
from builders.limits import capped
from builders.lowering.host import HostLowering
from builders.planner import plan, stage_borders, text_stage_plans, vision_stage_plans
from builders.quantize import choose_group_size, quantize
from builders.qwen_tower import VisionPart, vision_graph
from builders.run_check import run_child
from builders.stages import stage_file
from builders.targets import TARGETS
from builders.weights import WeightSource
from edgevlm import __version__
from edgevlm.bundle import (
    CHAT_TEMPLATE,
    EMBEDDING_TABLE,
    FORMAT_VERSION,
    LLM_GRAPH,
    REFERENCE,
    TOKENIZER,
    VISION_GRAPH,
    Manifest,
    StageSpec,
    record,
    write_manifest,
)
from edgevlm.chat_template import ChatTemplate
from edgevlm.config import Limits, ModelConfig
from edgevlm.device import Machine, usable_bytes
from edgevlm.errors import BuildError, RequestError
from edgevlm.memory_plan import with_tensors
from edgevlm.preprocess import max_patches, resize_image
from edgevlm.prompt import PromptBuilder
from edgevlm.reference import Case, Reference, sampled_ids, write_reference
from edgevlm.tokenizer import Tokenizer

STEPS = 8
STAGE_BYTES = 64 << 20  # of float32 in a stage, where a layer is no more than that
MIN_RESIDENT_BYTES = 16 << 20
HOST_LIMIT = 2 << 30  # bytes in float32 beyond which a build for this machine would take too long
QUESTIONS = (
    "The capital of France is",
    "Write one sentence about a red bicycle, then count to five.",
)
LOOK = "What is in this picture?"
SIZE = (96, 64)


@dataclass(frozen=True)
class Setting:
    """What a reference is made from and for."""

    source: WeightSource
    model: ModelConfig  # its pictures capped as in the bundle
    policy: WeightPolicy
    max_seq_len: int
    special_tokens: dict[str, str]
    directory: Path  # of the bundle that is being built; tokenizer and template are there
    host: bool  # the bundle is for the host


class Rounded:
    """A weight source with every matrix as its INT4 codes have it."""

    def __init__(self, source: WeightSource, policy: WeightPolicy) -> None:
        self._source, self._policy = source, policy

    def names(self) -> Collection[str]:
        """As the source."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """As the source."""
        return self._source.shape(name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Quantised and back."""
        return self._rounded(name, self._source.tensor(name))

    def rows(self, name: str, begin: int, end: int) -> NDArray[np.float32]:
        """Quantised and back: groups lie within rows, so a band is as it is in the whole."""
        return self._rounded(name, self._source.rows(name, begin, end))

    def _rounded(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        shape = self.shape(name)
        group = choose_group_size(shape[1], self._policy.group_size) if len(shape) == 2 else None
        if group is None or name.startswith("visual."):
            return values
        return quantize(values, group, name).dequantize()


def drawing(seed: int) -> Image.Image:
    """A gradient with a disc and a bar: edges, areas and colours, by arithmetic alone."""
    width, height = SIZE
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * 2 + 40 * seed) % 256, (y * 3) % 256, ((x + y) * (1 + seed)) % 256]
    picture = Image.fromarray(np.stack(channels, -1).astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    pen.ellipse((10 + 30 * seed, 8, 46 + 30 * seed, 44), fill=(220, 30, 40))
    pen.rectangle((8, 48, 88, 56), fill=(20, 40, 200))
    return picture


def write_cases(setting: Setting, reason: str) -> Reference:
    """Write the prompts that fit the bundle's limits, without logits."""
    cases = [_case(setting, question) for question in QUESTIONS]
    if setting.model.vision is not None:
        cases += [_case(setting, LOOK, drawing(seed)) for seed in (0, 1)]
    sample = sampled_ids(setting.model.text.vocab_size)
    reference = Reference(tuple(c for c in cases if c), sample, reason=reason)
    write_reference(setting.directory / REFERENCE, reference)
    return reference


def _case(setting: Setting, question: str, picture: Image.Image | None = None) -> Case | None:
    """None where the prompt is too long, or where there is no template to place a picture with."""
    model, directory = setting.model, setting.directory
    tokens = model.image_tokens
    protected = () if tokens is None else (tokens.image, tokens.vision_start, tokens.vision_end)
    path, template = directory / CHAT_TEMPLATE, None
    if path.is_file():
        template = ChatTemplate(path.read_text(encoding="utf-8"), setting.special_tokens)
    tokenizer = Tokenizer.from_file(directory / TOKENIZER, protected)
    try:
        builder = PromptBuilder(model, tokenizer, template)
        prompt = builder.build(question, [] if picture is None else [picture])
    except RequestError:
        return None
    room = setting.max_seq_len - len(prompt.ids)
    if room < 1:
        return None
    case = Case(question, prompt.ids, prompt.positions, min(STEPS, room))
    if picture is None:
        return case
    assert model.image_processor is not None
    (run,) = prompt.image_runs
    pixels = io.BytesIO()
    resize_image(picture, model.image_processor).save(pixels, "PNG")
    return replace(
        case, picture=pixels.getvalue(), grid=prompt.grids[0], row=run.start, tokens=run.length
    )


@dataclass(frozen=True)
class Made:
    """What came of it: `reason` None where the reference has logits, else why it has none."""

    reason: str | None
    peak_rss_bytes: int | None = None  # of the process that ran the checkpoint


def make_reference(setting: Setting, machine: Machine, wanted: bool) -> Made:
    """Write reference.npz. Raises BuildError."""
    reason = _reason(setting, machine) if wanted else "not made: built with --no-reference"
    reference = write_cases(setting, reason or "not made")
    if not reference.cases:
        raise BuildError(
            f"--max-seq-len {setting.max_seq_len} is too short for a single question; raise it"
        )
    if reason is not None:
        return Made(reason)
    work = setting.directory / "reference.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        whole = _write_bundle(setting, reference, work / "fp32", setting.source)
        bundles = [whole]
        if setting.policy.weights == "int4":
            rounded = Rounded(setting.source, setting.policy)
            bundles.append(_write_bundle(setting, reference, work / "int4", rounded))
        resident = resident_bytes(fp32_bytes(setting.source))
        said = run_child("record", str(resident), setting.directory / REFERENCE, *bundles)
        found = json.loads(said)
        return Made(found["reason"], found["peak_rss_bytes"])
    finally:
        shutil.rmtree(work, ignore_errors=True)


def resident_bytes(weights: int) -> int:
    """How many bytes of stages may stay loaded while a reference of `weights` bytes is made.

    Half of what a 16-bit checkpoint has, less what interpreter and head take: then the process
    stays below the checkpoint.
    """
    return max(MIN_RESIDENT_BYTES, weights // 4 - (256 << 20))


def largest_piece(source: WeightSource) -> int:
    """Bytes in float32 of what is never cut: a layer, a block, or the head."""
    sums: dict[str, int] = {}
    for name in source.names():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        piece = name if number is None else ".".join(parts[: number + 1])
        sums[piece] = sums.get(piece, 0) + 4 * math.prod(source.shape(name))
    # What is neither block nor head goes with a block.
    beside = ("visual.merger", "visual.patch_embed")
    return max(sums.values()) + sum(n for piece, n in sums.items() if piece.startswith(beside))


def fp32_bytes(source: WeightSource) -> int:
    """All weights in float32."""
    return sum(4 * math.prod(source.shape(name)) for name in source.names())


def _reason(setting: Setting, machine: Machine) -> str | None:
    """Why no reference can be made here."""
    if importlib.util.find_spec("onnxruntime") is None:
        return "not made: it needs onnxruntime (pip install 'edgevlm[host]')"
    weights = fp32_bytes(setting.source)
    if setting.host and weights > HOST_LIMIT:
        return f"not made: {weights:,} bytes in float32, more than {HOST_LIMIT:,}"
    # Stages come and go; what the page cache cannot hold would be read anew for every token.
    needed, usable = weights + resident_bytes(weights), usable_bytes(machine)
    if usable is None or needed > usable:
        return f"not made: needs {needed:,} bytes of memory and {usable or 0:,} can be had"
    free = shutil.disk_usage(setting.directory).free
    if 2 * weights + (1 << 30) > free:
        return f"not made: needs {2 * weights:,} bytes of disk and a GiB beside; {free:,} are free"
    return None


def _write_bundle(setting: Setting, reference: Reference, work: Path, source: WeightSource) -> Path:
    """The same model in float32 for the host, as small as these prompts allow."""
    lowering, policy = HostLowering(), WeightPolicy("fp32", 128)
    limits, model = _limits(setting, reference)
    ledger = plan(model, limits, policy, TARGETS["host"], "host")
    work.mkdir()
    limit = max(STAGE_BYTES, largest_piece(source)) // 2  # stages are counted in 16 bits
    text, vision = text_stage_plans(model, policy, limit), vision_stage_plans(model, limit)
    ledger = with_tensors(ledger, "io", stage_borders(model, limits, text, vision, "float32"))
    graphs: dict[str, list[GraphFile]] = {"prefill": []}
    for i, stage in enumerate(text):
        path = work / stage_file(LLM_GRAPH, i, len(text))
        part = TextPart(stage.first_layer, stage.end_layer, stage.head)
        made = text_graph(lowering, source, model.text, limits, policy, path, part)
        graphs["prefill"].append(made)
    graphs["decode"] = graphs["prefill"]
    if model.vision is not None and limits.max_pixels:
        graphs["vision"] = []
        for i, stage in enumerate(vision):
            path = work / stage_file(VISION_GRAPH, i, len(vision))
            block = VisionPart(stage.first_layer, stage.end_layer)
            graphs["vision"].append(vision_graph(lowering, source, model.vision, path, block))
    write_embedding_table(setting.source, work / EMBEDDING_TABLE, "float32")
    shutil.copyfile(setting.directory / REFERENCE, work / REFERENCE)
    manifest = Manifest(
        version=FORMAT_VERSION,
        edgevlm=__version__,
        target="host",
        executor="host",
        lowering="host",
        weights="fp32",
        model=model,
        special_tokens={},
        phases={
            phase: tuple(StageSpec(g.path.name, g.inputs, g.outputs) for g in stages)
            for phase, stages in graphs.items()
        },
        plan=ledger,
        build={},
        # Whoever reads it wrote it a moment ago: sizes and digests of the rest would only cost.
        files={REFERENCE: record(work / REFERENCE)},
    )
    write_manifest(work, manifest)
    return work


def _limits(setting: Setting, reference: Reference) -> tuple[Limits, ModelConfig]:
    longest = max(len(c.ids) + c.steps for c in reference.cases)
    patches = max((math.prod(c.grid) for c in reference.cases), default=0)
    limits = Limits(longest, min(longest, 512), 1)
    processor = setting.model.image_processor
    if processor is None or not patches:
        return limits, setting.model
    area = patches * processor.patch_size**2
    pixels = min(max(area, processor.min_pixels), processor.max_pixels)
    while max_patches(replace(processor, max_pixels=pixels)) < patches:
        pixels += (processor.patch_size * processor.merge_size) ** 2
    limits = replace(limits, max_images=1, max_pixels=pixels)
    return limits, capped(setting.model, limits)
