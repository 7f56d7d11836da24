"""Features that the decoder adds after its first layers: to rows of pictures, and to no others."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from edgevlm import VLM, SamplingParams
from edgevlm.bundle import Bundle
from edgevlm.executors.host import HostExecutor
from edgevlm.memory_plan import Pool, place, placed_bytes
from edgevlm.preprocess import resize_image
from edgevlm.runner import ModelRunner
from tests.tiny_models import Tiny, TinyModels, assert_close, make_prompt, picture, prefill, running

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PLACES = ("deepstack.0", "deepstack.1")
LONG = "What is in the picture, and what is beside it? " * 3


@pytest.fixture(scope="module")
def model(tiny: TinyModels) -> Tiny:
    return tiny.get("qwen3_vl")


@pytest.fixture
def runner(model: Tiny) -> Iterator[ModelRunner]:
    with running(model) as opened:
        yield opened


def test_a_bundle_says_where_features_go(tiny: TinyModels, model: Tiny) -> None:
    assert model.bundle.manifest.feature_placements == ("inputs_embeds", *PLACES)
    assert tiny.get("qwen2_vl").bundle.manifest.feature_placements == ("inputs_embeds",)
    assert tiny.get("qwen2").bundle.manifest.feature_placements == ()


def test_text_where_a_picture_was_is_read_as_text(model: Tiny, runner: ModelRunner) -> None:
    """Without clearing, the picture's features would be added to the text's hidden states."""
    text = make_prompt(model, LONG)
    before = prefill(runner, 0, text)
    pictures = [picture(112, 112), picture(60, 100)]
    seen = make_prompt(model, "And these?", pictures)
    prefill(runner, 1, seen, pictures)
    filled = runner.executor.read(PLACES[1])
    for run in seen.image_runs:
        assert filled[run.start : run.start + run.length].any(axis=1).all()
    assert np.array_equal(prefill(runner, 2, text), before)
    assert not filled[: len(text.ids)].any()


def test_rows_of_decode_are_zero_from_the_start(model: Tiny, runner: ModelRunner) -> None:
    slots = runner.limits.slots
    pictures = [picture(112, 112)]
    prefill(runner, 0, make_prompt(model, "What?", pictures), pictures)
    runner.decode([(runner.slots[0], 65)])
    for name in PLACES:
        assert not runner.executor.read(name)[-slots:].any()


def test_a_start_clears_what_warming_up_left(model: Tiny, runner: ModelRunner) -> None:
    for name in PLACES:
        runner.executor.read(name)[...] = 1.0
    ModelRunner(model.bundle, runner.executor)
    for name in PLACES:
        assert not runner.executor.read(name).any()


def test_a_picture_across_chunks_is_what_transformers_says(
    model: Tiny, runner: ModelRunner
) -> None:
    """Its rows begin in one chunk of 64 tokens and end in the next."""
    pictures = [picture(112, 112), picture(112, 80, seed=1)]
    parts = [{"type": "text", "text": "x" * 53}, {"type": "image"}, {"type": "image"}]
    prompt = make_prompt(model, [{"role": "user", "content": parts}], pictures)
    assert any(run.start < 64 < run.start + run.length for run in prompt.image_runs)
    expected = model.all_logits(prompt.ids, pictures)[-1]
    assert_close(prefill(runner, 0, prompt, pictures), expected)


def with_cache(bundle: Bundle, places: tuple[str, ...], rows: int) -> Bundle:
    """The same bundle with a vision cache for features of these places."""
    plan, width = bundle.manifest.plan, bundle.manifest.model.text.hidden_size
    names = ["vision_cache" if p == "inputs_embeds" else f"vision_cache.{p}" for p in places]
    placed = place("vision_cache", [(name, "float32", (rows, width)) for name in names])
    pools = (*plan.pools, Pool("vision_cache", placed_bytes(placed), "for a test"))
    plan = replace(plan, pools=pools, placements=(*plan.placements, *placed))
    return replace(bundle, manifest=replace(bundle.manifest, plan=plan))


@pytest.mark.parametrize(
    ("places", "hits"), [(("inputs_embeds", *PLACES), 1), (("inputs_embeds",), 0)]
)
def test_a_cached_picture_brings_all_its_features(
    model: Tiny, places: tuple[str, ...], hits: int
) -> None:
    """A cache without room for some of them keeps none: half of a picture would be another."""
    pictures = [picture(112, 112)]
    first = make_prompt(model, "What?", pictures)
    parts = [{"type": "text", "text": "Well, " * 9}, {"type": "image"}]
    moved = make_prompt(model, [{"role": "user", "content": parts}], pictures)
    expected = model.all_logits(moved.ids, pictures)[-1]
    processor = model.bundle.manifest.model.image_processor
    assert processor is not None
    resized = [resize_image(image, processor) for image in pictures]
    bundle = with_cache(model.bundle, places, 64)
    executor = HostExecutor(bundle, threads=1)
    runner = ModelRunner(bundle, executor)
    for slot, prompt in enumerate((first, moved)):
        keys = prompt.keys([b"a picture"])
        work = runner.ingest(runner.slots[slot], prompt, keys, resized, [b"a picture"], 0)
        while True:
            try:
                next(work)
            except StopIteration as done:
                logits = done.value
                break
    assert_close(logits, expected)
    assert runner.vision_cache.hits == hits
    executor.close()


def test_a_follow_up_goes_on_after_the_picture(model: Tiny) -> None:
    """The picture lies in the cache; what follows it is text, in rows where others had pictures."""
    image, other = picture(100, 60), picture(112, 112, seed=3)
    with VLM(model.bundle.path, threads=1) as vlm:
        vlm.generate(LONG * 2, images=[other] * 3, params=GREEDY)  # fills rows further on
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
        first = vlm.generate(messages, images=[image], params=GREEDY)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": LONG},
        ]
        again = vlm.generate(messages, images=[image], params=GREEDY)
        assert again.usage["cached_tokens"] > again.usage["image_tokens"]
    with VLM(model.bundle.path, threads=1) as fresh:
        assert fresh.generate(messages, images=[image], params=GREEDY).text == again.text
