"""Runner, executor and VLM together on tiny models: what slots, chunks and caches must not change.

Pixels and prompts have tests of their own; here ids go in and logits or tokens come out.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from edgevlm import VLM, SamplingParams
from edgevlm.errors import ExecutorError, PromptTooLong, TooManyImages
from edgevlm.runner import ModelRunner
from tests.tiny_models import (
    KINDS,
    LIMITS,
    MAX_PIXELS,
    VISION_KINDS,
    TinyModels,
    assert_close,
    make_prompt,
    picture,
    prefill,
    running,
)

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
QUESTION = "What is in the picture? Say it in a word."
ODD_SIZES = [(1, 1), (22, 3), (1000, 5), (2600, 13), (4000, 3000)]
MAX_SEQ_LEN = LIMITS["max_seq_len"]


@pytest.fixture(scope="module")
def vlm(tiny: TinyModels) -> Iterator[VLM]:
    with VLM(tiny.get("qwen2_vl").bundle.path, threads=1) as opened:
        yield opened


def fresh(tiny: TinyModels, name: str = "qwen2_vl") -> VLM:
    return VLM(tiny.get(name).bundle.path, threads=1)


@pytest.mark.parametrize("name", KINDS)
def test_64_greedy_tokens_equal_transformers(tiny: TinyModels, name: str) -> None:
    """Text only; and where the model sees: odd sizes, and two pictures in one prompt."""
    model = tiny.get(name)
    requests: list[list[Image.Image]] = [[]]
    if name in VISION_KINDS:
        requests += [[picture(*size)] for size in ODD_SIZES]
        requests += [[picture(90, 60), picture(60, 70)]]
    with fresh(tiny, name) as vlm:
        for pictures in requests:
            answer = vlm.generate(QUESTION, images=pictures, params=GREEDY)
            ids = make_prompt(model, QUESTION, pictures).ids
            assert answer.usage["prompt_tokens"] == len(ids)
            assert len(answer.token_ids) == 64
            assert answer.token_ids == model.next_tokens(ids, answer.token_ids, pictures)
        assert vlm.allocations_after_start == 0
        assert answer.memory["allocations_after_start"] == 0


@pytest.mark.parametrize("name", VISION_KINDS)
def test_logits_after_pictures_equal_transformers(tiny: TinyModels, name: str) -> None:
    model = tiny.get(name)
    with running(model) as runner:
        for sizes in ([(100, 60)], [(57, 111), (22, 3)]):
            pictures = [picture(*size) for size in sizes]
            prompt = make_prompt(model, QUESTION, pictures)
            expected = model.all_logits(prompt.ids, pictures)[-1]
            assert_close(prefill(runner, 1, prompt, pictures), expected)


def step(runner: ModelRunner, slots: list[int], rows: list[np.ndarray], count: int) -> None:
    """Greedy steps of some slots in one batch; every row of logits is appended to its list."""
    for _ in range(count):
        tokens = [(runner.slots[s], int(rows[s][-1].argmax())) for s in slots]
        for index, logits in runner.decode(tokens).items():
            rows[index].append(logits.copy())


def test_three_slots_together_are_each_alone(tiny: TinyModels) -> None:
    """One with a picture; in between, slots stand idle and other prompts arrive."""
    model = tiny.get("qwen2_5_vl-hub")
    pictures = [[], [picture(100, 60)], []]
    texts = ["One?", "And what is this?", "A longer question, of several more words, is this."]
    prompts = [make_prompt(model, t, p) for t, p in zip(texts, pictures, strict=True)]
    with running(model) as runner:
        alone = []
        for slot, prompt in enumerate(prompts):
            rows = [[], [], []]
            rows[slot] = [prefill(runner, slot, prompt, pictures[slot])]
            step(runner, [slot], rows, 24)
            alone.append(rows[slot])
    with running(model) as runner:
        rows = [[], [], []]
        rows[0] = [prefill(runner, 0, prompts[0])]
        step(runner, [0], rows, 4)
        rows[2] = [prefill(runner, 2, prompts[2])]
        step(runner, [0, 2], rows, 4)  # slot 1 lies idle in between
        rows[1] = [prefill(runner, 1, prompts[1], pictures[1])]
        step(runner, [0, 1, 2], rows, 8)
        step(runner, [0, 2], rows, 3)  # slot 1 idles with a sequence in its cache
        step(runner, [1], rows, 5)
        step(runner, [0, 1, 2], rows, 4)
    for together, single in zip(rows, alone, strict=True):
        for found, expected in zip(together, single, strict=False):
            assert_close(found, expected, 1 - 1e-9)


def test_an_idle_full_slot_between_two_others(tiny: TinyModels) -> None:
    """It is written to, as every slot of a batch is, and must not lose a token it remembers."""
    model = tiny.get("llama")
    prompt = make_prompt(model, "x" * (MAX_SEQ_LEN - 60))
    with running(model) as runner:
        logits = prefill(runner, 1, prompt)
        while runner.slots[1].length < MAX_SEQ_LEN:
            logits = runner.decode([(runner.slots[1], int(logits.argmax()))])[1]
        with pytest.raises(ValueError, match="slot 1 is full"):
            runner.decode([(runner.slots[1], 5)])
        for slot in (0, 2):
            prefill(runner, slot, make_prompt(model, "hello"))
        runner.decode([(runner.slots[0], 5), (runner.slots[2], 5)])
        kept = runner.slots[1].length
        assert kept == MAX_SEQ_LEN - 1
        ids = runner.slots[1].keys[:kept].copy()
        positions = np.arange(kept)[None]
        again = runner.prefill(runner.slots[1], ids, ids, positions, kept - 1).copy()
        assert_close(again, runner.prefill(runner.slots[0], ids, ids, positions, 0), 1 - 1e-9)


def tokens(vlm: VLM, prompt: object, images: list[Image.Image], count: int = 12) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return vlm.generate(prompt, images=images, params=params).token_ids  # type: ignore[arg-type]


def conversation(first: str, answer: str, second: str, pictures: int) -> list[dict[str, object]]:
    content = [{"type": "image"}] * pictures + [{"type": "text", "text": first}]
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": second},
    ]


@pytest.mark.parametrize("sizes", [[], [(100, 60)], [(100, 60), (60, 90)]])
def test_a_second_turn_equals_a_fresh_run(
    tiny: TinyModels, vlm: VLM, sizes: list[tuple[int, int]]
) -> None:
    """And it reuses exactly what both prompts begin with."""
    pictures = [picture(*size, seed=3) for size in sizes]
    turns = conversation("What is this?", "A noise.", "And now?", len(pictures))
    model = tiny.get("qwen2_vl")
    first = make_prompt(model, turns[:1], pictures).ids
    second = make_prompt(model, turns, pictures).ids
    answer = tokens(vlm, turns[:1], pictures)
    cached = np.concatenate([first, answer[:-1]])
    length = min(len(cached), len(second))
    same = int(np.argmin(np.append(cached[:length] == second[:length], False)))
    assert same >= len(first)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    found = vlm.generate(turns, images=pictures, params=params)
    assert found.usage["cached_tokens"] == same
    with fresh(tiny) as other:
        expected = other.generate(turns, images=pictures, params=params)
    assert expected.usage["cached_tokens"] == 0
    assert found.token_ids == expected.token_ids


def test_the_same_prompt_again_computes_its_last_token_only(vlm: VLM) -> None:
    images = [picture(64, 64, seed=5)]
    first = vlm.generate(QUESTION, images=images, params=GREEDY)
    again = vlm.generate(QUESTION, images=images, params=GREEDY)
    assert again.token_ids == first.token_ids
    assert again.usage["cached_tokens"] == again.usage["prompt_tokens"] - 1


def test_another_picture_of_the_same_size_is_not_the_cached_one(tiny: TinyModels, vlm: VLM) -> None:
    a, b = picture(100, 60, seed=1), picture(100, 60, seed=2)
    with fresh(tiny) as other:
        alone = tokens(other, QUESTION, [b])
    with fresh(tiny) as other:
        of_a = tokens(other, QUESTION, [a])
        assert tokens(other, QUESTION, [b]) == alone
        assert tokens(other, QUESTION, [a, b]) != tokens(other, QUESTION, [b, a])
        assert tokens(other, QUESTION, [a]) == of_a
    assert of_a != alone


def test_a_picture_partly_in_the_cached_prefix_is_computed_whole(tiny: TinyModels) -> None:
    """Same first rows, another end: a picture's rows come all at once."""
    model = tiny.get("qwen2_vl")
    image = picture(100, 60)
    prompt = make_prompt(model, QUESTION, [image])
    run = prompt.image_runs[0]
    with fresh(tiny) as vlm:
        expected = tokens(vlm, QUESTION, [image])
        for slot in vlm._runner.slots:
            slot.keys[run.start + 3 :] = -5
        found = vlm.generate(QUESTION, images=[image], params=GREEDY)
        assert found.usage["cached_tokens"] == run.start
        assert found.token_ids[:12] == expected


def test_a_prompt_that_leaves_room_for_one_token(vlm: VLM, tiny: TinyModels) -> None:
    empty = len(make_prompt(tiny.get("qwen2_vl"), "").ids)
    largest = MAX_SEQ_LEN - 1 - empty
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    result = vlm.generate("x" * largest, params=params)
    assert len(result.token_ids) == 1 and result.finish_reason == "length"
    result = vlm.generate("x" * (largest - 5), params=params)
    assert len(result.token_ids) == 6
    with pytest.raises(PromptTooLong, match=f"{MAX_SEQ_LEN}.*--max-seq-len"):
        vlm.generate("x" * (largest + 1), params=params)


def test_as_many_pictures_as_were_planned_and_not_one_more(vlm: VLM) -> None:
    limit = vlm.bundle.manifest.limits.max_images
    images = [picture(30, 30, seed=i) for i in range(limit + 1)]
    assert tokens(vlm, QUESTION, images[:-1], 2)
    with pytest.raises(TooManyImages, match=f"{limit + 1} images.*--max-images"):
        tokens(vlm, QUESTION, images, 2)


def test_the_largest_pictures_fit_the_plan(vlm: VLM) -> None:
    """At the pixel cap, and thin ones that pass it."""
    side = int(MAX_PIXELS**0.5)
    for size in ((side, side), (side + 1, side), (28 * 12, 28), (5600, 28), (28, 5600)):
        assert tokens(vlm, QUESTION, [picture(*size)], 2)


def test_logits_that_are_not_finite_end_the_answer_and_not_the_slot(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fresh(tiny) as vlm:
        expected = tokens(vlm, QUESTION, [])
        decode = vlm._runner.decode

        def broken(steps: object) -> dict[int, np.ndarray]:
            vlm._executor.read("past_key_values.0.key")[...] = np.nan
            return decode(steps)  # type: ignore[arg-type]

        monkeypatch.setattr(vlm._runner, "decode", broken)
        stream = vlm.stream(QUESTION, params=GREEDY)
        next(stream)
        with pytest.raises(ExecutorError, match="not finite"):
            next(stream)
        assert not any(slot.busy for slot in vlm._runner.slots)
        monkeypatch.undo()
        vlm._executor.read("past_key_values.0.key")[...] = 0
        assert tokens(vlm, QUESTION, []) == expected


def test_streams_take_turns_and_equal_each_alone(tiny: TinyModels, vlm: VLM) -> None:
    questions = ["One?", "Two, which is more?", "And three, the most of them all?"]
    alone = [tokens(vlm, question, [], 20) for question in questions]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0)
    with fresh(tiny) as other:
        streams = [other.stream(question, params=params) for question in questions]
        ids: list[list[int]] = [[], [], []]
        for deltas in itertools.zip_longest(*streams):
            for own, delta in zip(ids, deltas, strict=True):
                own += delta.token_ids if delta is not None else []
    assert ids == alone
