"""The planned arena is enough for every shape in every order, and not much more than enough."""

import dataclasses

import numpy as np
import pytest

from builders.lowering import host_memory
from edgevlm.bundle import Bundle
from edgevlm.config import ModelConfig
from edgevlm.errors import ExecutorError
from edgevlm.executors.host import HostExecutor
from edgevlm.positions import vision_windows
from edgevlm.preprocess import max_patches
from tests.edgevlm.executors.test_host import needs_seal, with_arena
from tests.tiny_models import KINDS, VISION_KINDS, TinyModels


def run_vision(executor: HostExecutor, model: ModelConfig, h: int, w: int) -> None:
    vision = model.vision
    assert vision is not None
    dims = {}
    if vision.window_size is not None:
        windows = vision_windows((1, h, w), vision)
        mask = windows.window_mask
        executor.write("window_index", windows.window_index.reshape(mask.shape))
        executor.write("window_mask", mask)
        executor.write("window_position", windows.window_position)
        dims["num_windows"] = len(mask)
    executor.run("vision", num_patches=h * w, num_image_tokens=h * w // 4, image_row=0, **dims)


def run_text(executor: HostExecutor, length: int, start: int) -> None:
    executor.write("write_indices", np.array([start]))
    executor.write("position_ids", np.arange(start, start + length))
    executor.run("prefill", batch_size=1, sequence_length=length, row=0, slot=0)


def run_decode(executor: HostExecutor, start: int, slots: int) -> None:
    executor.write("write_indices", np.full(slots, start))
    executor.write("position_ids", np.full(slots, start))
    executor.run("decode", batch_size=slots, sequence_length=1, row=0, slot=0)


def soak(bundle: Bundle, executor: HostExecutor, rounds: int, seed: int) -> None:
    """Random shapes of every phase, the largest among them again and again."""
    rng = np.random.default_rng(seed)
    manifest = bundle.manifest
    model, limits = manifest.model, manifest.limits
    side = 2
    if model.image_processor is not None:
        side = int(max_patches(model.image_processor) ** 0.5) // 2
    for turn in range(rounds):
        length = limits.max_prefill_chunk
        if turn % 3:
            length = int(rng.integers(1, length + 1))
        run_text(executor, length, int(rng.integers(0, limits.max_seq_len - length + 1)))
        run_decode(executor, int(rng.integers(0, limits.max_seq_len)), limits.slots)
        if model.vision is not None:
            h = w = side
            if turn % 3:
                h, w = (int(n) for n in rng.integers(1, side + 1, 2))
            run_vision(executor, model, h * 2, w * 2)


@pytest.mark.parametrize("name", [*VISION_KINDS, "llama"])
def test_every_shape_in_every_order_runs_in_the_planned_arena(tiny: TinyModels, name: str) -> None:
    """Without the constant that covers small tensors there is nothing to spare at this size."""
    bundle = tiny.get(name).bundle
    planned = bundle.manifest.plan.pool("activations").bytes
    for nbytes in (planned, planned - host_memory.BASE_BYTES * 3 // 4):
        executor = HostExecutor(with_arena(bundle, nbytes), threads=1)
        soak(bundle, executor, 30, seed=len(name))
        assert executor.allocations_after_start == 0
        executor.close()


@needs_seal
def test_an_arena_of_half_the_size_is_not_enough(tiny: TinyModels) -> None:
    bundle = tiny.get("llama").bundle
    planned = bundle.manifest.plan.pool("activations").bytes - host_memory.BASE_BYTES
    executor = HostExecutor(with_arena(bundle, planned // 2), threads=1)
    with pytest.raises(ExecutorError, match="prefill"):
        soak(bundle, executor, 1, seed=0)
    executor.close()


@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "qwen2_5_vl-hub"])
def test_the_bound_is_linear(tiny: TinyModels, name: str) -> None:
    """In tokens of a chunk, and in patches (F1: no scores of patches by patches)."""
    assert name in KINDS
    manifest = tiny.get(name).bundle.manifest
    chunks = [dataclasses.replace(manifest.limits, max_prefill_chunk=n) for n in (512, 2048)]
    small, large = (host_memory.activation_bytes(manifest.model, c, 4)[0] for c in chunks)
    assert large <= 4.2 * small
    if manifest.model.vision is not None:
        counts = (16384, 65536)
        small, large = (
            host_memory.activation_bytes(manifest.model, manifest.limits, n)[0] for n in counts
        )
        assert large <= 4.2 * small
