"""Logits and features of every kind of checkpoint, through bundle, runner and executor."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from edgevlm.bundle import EMBEDDING_TABLE
from edgevlm.positions import plain_positions
from edgevlm.preprocess import image_grid, resize_image
from edgevlm.runner import ModelRunner
from tests.tiny_models import (
    KINDS,
    VISION_KINDS,
    Tiny,
    TinyModels,
    assert_close,
    picture,
    running,
)

IDS = np.random.default_rng(5).integers(0, 256, 200)
SIZES = [(100, 60), (1, 1), (22, 3), (1000, 5), (2600, 13), (4000, 3000), (57, 111), (112, 112)]


def prefill_text(
    runner: ModelRunner, ids: NDArray[np.int64], slot: int = 0, start: int = 0
) -> NDArray[np.float32]:
    positions = plain_positions(len(ids))
    if runner.model.text.rope.scheme != "plain":
        positions = np.repeat(positions, 3, axis=0)
    return runner.prefill(runner.slots[slot], ids, ids, positions, start).copy()


@pytest.mark.parametrize("name", KINDS)
def test_prefill_and_decode_equal_transformers(tiny: TinyModels, name: str) -> None:
    """Prompts of one token, a chunk less and more one, and several chunks; then 64 steps."""
    model = tiny.get(name)
    expected = model.all_logits(IDS)
    with running(model) as runner:
        for length in (1, 2, 63, 64, 65, 130):
            assert_close(prefill_text(runner, IDS[:length]), expected[length - 1])
        for at in range(130, 194):
            logits = runner.decode([(runner.slots[0], int(IDS[at]))])[0]
            assert_close(logits, expected[at])


@pytest.mark.parametrize("name", ["llama3-tied", "qwen2_vl"])
def test_cached_decode_is_full_prefill(tiny: TinyModels, name: str) -> None:
    with running(tiny.get(name)) as runner:
        prefill_text(runner, IDS[:20])
        for at in range(20, 90):
            decoded = runner.decode([(runner.slots[0], int(IDS[at]))])[0].copy()
            assert_close(decoded, prefill_text(runner, IDS[: at + 1], slot=1), 1 - 1e-9)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl-tied"])
def test_chunks_of_three_change_nothing(tiny: TinyModels, name: str) -> None:
    whole, chunked = tiny.get(name), tiny.get(name, max_prefill_chunk=3)
    with running(whole) as one, running(chunked) as many:
        for length in (1, 2, 3, 4, 62, 64):
            expected = prefill_text(one, IDS[:length])
            assert_close(prefill_text(many, IDS[:length]), expected, 1 - 1e-9)


def test_a_prompt_goes_on_from_a_cached_prefix(tiny: TinyModels) -> None:
    with running(tiny.get("llama")) as runner:
        expected = prefill_text(runner, IDS[:100], slot=1)
        prefill_text(runner, IDS[:70])
        for start in (1, 37, 64, 69):
            assert_close(prefill_text(runner, IDS[:100], start=start), expected, 1 - 1e-9)


def features(runner: ModelRunner, image: Image.Image, row: int = 0) -> NDArray[np.float32]:
    """Rows of inputs_embeds that a picture fills."""
    processor = runner.model.image_processor
    assert processor is not None
    grid = image_grid(processor, image.size)
    runner.encode_image(resize_image(image, processor), grid, row)
    count = grid[1] * grid[2] // processor.merge_size**2
    return runner.executor.read("inputs_embeds")[row : row + count].copy()


def expected_features(model: Tiny, image: Image.Image) -> NDArray[np.float32]:
    inputs = model.pixels([image])
    with torch.no_grad():
        tower = model.model.model.visual
        result = tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    return np.asarray(result.pooler_output.numpy())


@pytest.mark.parametrize("name", VISION_KINDS)
def test_features_equal_transformers(tiny: TinyModels, name: str) -> None:
    model = tiny.get(name)
    with running(model) as runner:
        for size in SIZES:
            image = picture(*size)
            assert_close(features(runner, image), expected_features(model, image))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl-hub"])
def test_features_alone_and_beside_another_picture_are_bit_equal(
    tiny: TinyModels, name: str
) -> None:
    with running(tiny.get(name)) as runner:
        alone = features(runner, picture(100, 60))
        features(runner, picture(112, 112, seed=1))
        beside = features(runner, picture(100, 60), row=len(alone) + 7)
        assert np.array_equal(alone, beside)


def test_features_fill_their_rows_and_no_others(tiny: TinyModels) -> None:
    with running(tiny.get("qwen2_5_vl-hub")) as runner:
        runner.executor.read("inputs_embeds")[...] = 7.0
        found = features(runner, picture(100, 60), row=5)
        rows = runner.executor.read("inputs_embeds")
        assert (rows[:5] == 7.0).all() and (rows[5 + len(found) :] == 7.0).all()
        assert not (found == 7.0).any()


def test_the_embedding_table_is_fp32_only_where_the_weights_are(tiny: TinyModels) -> None:
    for weights, itemsize in (("fp32", 4), ("int4", 2)):
        bundle = tiny.get("qwen2", weights=weights).bundle
        size = bundle.file(EMBEDDING_TABLE).stat().st_size
        text = bundle.manifest.model.text
        assert size == text.vocab_size * text.hidden_size * itemsize
        assert bundle.manifest.plan.pool("embedding_table").bytes == size
