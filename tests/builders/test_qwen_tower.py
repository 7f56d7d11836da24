"""The host towers against transformers in fp32, on tiny random models."""

import numpy as np
import pytest

from builders.lowering.host import HostLowering
from builders.qwen_tower import VisionPart, vision_graph
from edgevlm.config import Limits
from edgevlm.positions import learned_positions, vision_rope, vision_windows
from tests.graphs import Graphs, assert_close, tiny_model

torch = pytest.importorskip("torch")

LIMITS = Limits(max_seq_len=200, max_prefill_chunk=32, slots=1, max_images=1)
# One merged patch, a strip, exact windows, and windows cut on one side or both.
GRIDS = [(2, 2), (2, 58), (40, 6), (8, 16), (18, 26), (30, 10)]
FIRST_ROW = 5


class Tower:
    """A tiny model and its vision graph."""

    def __init__(self, name, path, parts=(None,)):
        self.hf, self.config, source = tiny_model(name)
        vision = self.config.vision
        files = [
            vision_graph(HostLowering(), source, vision, path / f"{i}.onnx", part)
            for i, part in enumerate(parts)
        ]
        self.files, self.graphs = files, Graphs(self.config, LIMITS, *files)

    def pixels(self, grid):
        shape = (grid[0] * grid[1], self.config.vision.patch_dim)
        return np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    def reference(self, pixels, grid):
        with torch.no_grad():
            output = self.hf.model.visual(torch.tensor(pixels), grid_thw=torch.tensor([(1, *grid)]))
        deep = getattr(output, "deepstack_features", [])
        return np.concatenate([output.pooler_output.numpy(), *(part.numpy() for part in deep)])

    def features(self, pixels, grid):
        """image_features [N / 4, H] and those of deepstack, from the rows they were bound to."""
        vision, arrays = self.config.vision, self.graphs.arrays
        n, tokens = len(pixels), len(pixels) // 4
        dims = {"num_patches": n, "num_image_tokens": tokens, "image_row": FIRST_ROW}
        arrays["pixel_values"][:n] = pixels
        arrays["vision_cos"][:n], arrays["vision_sin"][:n] = vision_rope((1, *grid), vision)
        if vision.num_position_embeddings is not None:
            index, weight = learned_positions((1, *grid), vision)
            arrays["pos_embed_index"][:n], arrays["pos_embed_weight"][:n] = index, weight
        if vision.window_size is not None:
            windows = vision_windows((1, *grid), vision)
            count = dims["num_windows"] = len(windows.window_mask)
            arrays["window_index"][:count] = windows.window_index.reshape(count, -1)
            arrays["window_mask"][:count] = windows.window_mask
            arrays["window_position"][:n] = windows.window_position
        self.graphs.run(**dims)
        places = ["inputs_embeds", *(f"deepstack.{i}" for i in range(self.config.text.deepstack))]
        return np.concatenate([arrays[p][FIRST_ROW : FIRST_ROW + tokens] for p in places])


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def tower(request, tmp_path_factory):
    return Tower(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("grid", GRIDS)
def test_features_are_what_transformers_says(tower, grid):
    pixels = tower.pixels(grid)
    assert_close(tower.features(pixels, grid), tower.reference(pixels, grid))


def test_nothing_beside_the_image_rows_is_written(tower):
    tower.graphs.arrays["inputs_embeds"][:] = 7
    tower.features(tower.pixels((4, 6)), (4, 6))
    assert (tower.graphs.arrays["inputs_embeds"][:FIRST_ROW] == 7).all()
    assert (tower.graphs.arrays["inputs_embeds"][FIRST_ROW + 6 :] == 7).all()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_stages_are_the_whole(name, tmp_path, tower):
    depth = {"qwen2_vl": 3}.get(name, 4)
    staged = Tower(name, tmp_path, (VisionPart(0, 1), VisionPart(1, 2), VisionPart(2, depth)))
    pixels = staged.pixels((18, 26))
    assert_close(staged.features(pixels, (18, 26)), staged.reference(pixels, (18, 26)))
    assert staged.files[1].inputs[0].name == "vision_states.1"


def test_only_windowed_stages_ask_for_windows(tmp_path):
    staged = Tower("qwen2_5_vl", tmp_path, (VisionPart(0, 1), VisionPart(1, 2), VisionPart(2, 4)))
    asks = [any(s.name.startswith("window_") for s in f.inputs) for f in staged.files]
    assert asks == [True, False, True]  # block 1 sees the whole picture
