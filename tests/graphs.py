"""A stand-in for the host executor and tiny random models, for tests of graphs alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import transformers
from numpy.typing import NDArray

from builders.checkpoint import canonical_name
from builders.decoder import GraphFile
from builders.models import FAMILIES
from builders.tensors import cache_shapes, io_shapes
from edgevlm.bundle import TensorSpec
from edgevlm.config import Limits, ModelConfig
from edgevlm.positions import max_windows, plain_positions, rope_rows
from edgevlm.preprocess import max_patches

PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 784,
    "max_pixels": 128 * 128 * 28,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SPECIAL = {"image_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
MROPE_INTERLEAVED = MROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 3, "embed_dim": 80, "num_heads": 4, "mlp_ratio": 2, "hidden_size": 64},
    "qwen2_5_vl": {
        "depth": 4,
        "hidden_size": 80,
        "num_heads": 4,
        "intermediate_size": 100,
        "out_hidden_size": 64,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
    },
    "qwen3_vl": {
        "depth": 4,
        "hidden_size": 80,
        "num_heads": 4,
        "intermediate_size": 100,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0, 2],
        "num_position_embeddings": 36,
    },
}


class ModelSource:
    """A transformers model as a `WeightSource`."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        self.tensors = {
            canonical_name(name): value.detach().float().numpy()
            for name, value in model.state_dict().items()
        }
        for ours, at in FAMILIES[config.model_type].stored(config).items():
            self.tensors[ours] = at.take(self.tensors[at.name])

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self.tensors[name].copy()

    def rows(self, name: str, begin: int, end: int) -> NDArray[np.float32]:
        return self.tensors[name][begin:end].copy()


def tiny_model(model_type: str, **changes: Any) -> tuple[Any, ModelConfig, ModelSource]:
    """A random model of transformers, our config of it, and its weights."""
    import torch

    torch.manual_seed(7)
    settings = TEXT | changes
    if model_type in TOWERS:
        settings |= {"rope_parameters": MROPE}
        if model_type == "qwen3_vl":
            settings |= {"rope_parameters": MROPE_INTERLEAVED, "head_dim": 32}
        config = transformers.AutoConfig.for_model(
            model_type, text_config=settings, vision_config=TOWERS[model_type], **SPECIAL
        )
        config.tie_word_embeddings = settings["tie_word_embeddings"]
        model = transformers.AutoModelForImageTextToText.from_config(config)
    else:
        config = transformers.AutoConfig.for_model(model_type, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.float().eval()
    with torch.no_grad():  # the initial 0.02 would leave every softmax flat
        for name, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * (0.3 if value.ndim == 1 else 0.15))
            if "norm" in name and name.endswith("weight") or "ln_q.weight" in name:
                value.add_(1.0)
    raw = config.to_dict() | {"model_type": model_type}
    preprocessor = PREPROCESSOR if model_type in TOWERS else None
    if model_type == "qwen3_vl":
        preprocessor = PREPROCESSOR | {"patch_size": 16}
    ours = FAMILIES[model_type].read_config(raw, {}, preprocessor, (0,))
    return model, ours, ModelSource(model, ours)


class Graphs:
    """Runs written graphs in ONNX Runtime over arrays bound by their specs."""

    def __init__(self, model: ModelConfig, limits: Limits, *files: GraphFile) -> None:
        self.model, self.limits = model, limits
        windows = 0
        if model.vision is not None and model.vision.window_size is not None:
            windows = max_windows(model.vision, max_patches(model.image_processor))
        shapes = io_shapes(model, limits, "float32", windows)
        shapes += cache_shapes(model.text, limits, "float32")
        self.arrays: dict[str, NDArray[Any]] = {n: np.zeros(s, d) for n, d, s in shapes}
        self.rope(plain_positions(limits.max_seq_len), 0)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        self.stages = [(file, ort.InferenceSession(str(file.path), options)) for file in files]

    def run(self, **dims: int) -> None:
        """Every stage in order."""
        for file, session in self.stages:
            binding = session.io_binding()
            for spec in file.inputs:
                binding.bind_input(*self._bound(spec, dims))
            for spec in file.outputs:
                binding.bind_output(*self._bound(spec, dims))
            session.run_with_iobinding(binding)

    def prefill(
        self,
        embeds: NDArray[np.float32],
        *,
        slot: int = 0,
        start: int = 0,
        chunk: int | None = None,
        positions: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32]:
        """Logits [vocab] after `embeds` [S, H], whose first token is number `start`.

        3-D `positions` have rows of their own after those of the table, written for each chunk.
        """
        chunk = chunk or len(embeds)
        own = self.limits.max_seq_len
        for at in range(0, len(embeds), chunk):
            rows = embeds[at : at + chunk]
            places = np.arange(len(rows)) + (start + at if positions is None else own)
            if positions is not None:
                self.rope(positions[:, at : at + chunk], own)
            self._tokens(rows, places, [start + at])
            self.run(batch_size=1, sequence_length=len(rows), row=0, slot=slot)
        return self.arrays["logits"][0].copy()

    def decode(
        self, embeds: NDArray[np.float32], lengths: Sequence[int], slot: int = 0, delta: int = 0
    ) -> NDArray[np.float32]:
        """Logits [B, vocab] of one token [B, H] each for slots from `slot` on."""
        self._tokens(embeds, np.array(lengths) + delta, lengths)
        self.run(batch_size=len(embeds), sequence_length=1, row=0, slot=slot)
        return self.arrays["logits"][: len(embeds)].copy()

    def rope(self, positions: NDArray[np.int64], first: int) -> None:
        """Fill the table's rows from `first` on."""
        cos, sin = rope_rows(positions, self.model.text)
        self.arrays["rope_cos"][first : first + len(cos)] = cos
        self.arrays["rope_sin"][first : first + len(sin)] = sin

    def _tokens(
        self, embeds: NDArray[np.float32], places: NDArray[np.int64], lengths: Sequence[int]
    ) -> None:
        self.arrays["inputs_embeds"][: len(embeds)] = embeds
        self.arrays["position_ids"][: len(places)] = places
        self.arrays["write_indices"][: len(lengths)] = lengths

    def _bound(self, spec: TensorSpec, dims: dict[str, int]) -> tuple[Any, ...]:
        shape = [dims[d] if isinstance(d, str) else d for d in spec.shape]
        if spec.placement not in self.arrays:  # hidden states between stages
            size = (1 << 20,)
            self.arrays[spec.placement] = np.zeros(size, np.float32)
        array = self.arrays[spec.placement]
        view = array[dims[spec.start] :] if spec.start else array
        assert int(np.prod(shape)) <= view.size, spec.name
        return spec.name, "cpu", 0, array.dtype, shape, view.ctypes.data


def assert_close(found: NDArray[Any], expected: NDArray[Any], cosine: float = 0.99999) -> None:
    """Every row points the same way, and no value is far off."""
    for row, wanted in zip(np.atleast_2d(found), np.atleast_2d(expected), strict=True):
        similarity = row @ wanted / (np.linalg.norm(row) * np.linalg.norm(wanted))
        assert similarity >= cosine, f"cosine {similarity}"
    worst = np.abs(found - expected).max() / np.abs(expected).max()
    assert worst <= 10 * np.sqrt(1 - cosine), f"off by {worst} of the largest value"
