"""The seam between names with numpy (above) and addresses with vendor libraries (below).

Two files implement it; a scripted one in the tests stands in for both. An executor takes every
pool of the plan when it is made and nothing after that.
"""

from typing import Any, Protocol

from numpy.typing import NDArray

from edgevlm.bundle import PhaseName


class Executor(Protocol):
    """Runs the phases of one bundle. `write`, `staging` and `read` use placement names.

    | placement | shape | written by |
    |---|---|---|
    | pixel_values | [max_patches, patch_dim] | host |
    | vision_cos, vision_sin | [max_patches, vision head_dim / 2] | host |
    | window_index, window_mask, window_position | see builders/tensors.py | host |
    | pos_embed_index, pos_embed_weight | [max_patches, 4] | host |
    | inputs_embeds | [max_seq_len + slots, hidden_size] | host (text), vision (images) |
    | deepstack.N | as inputs_embeds | host (zero: text), vision (images) |
    | rope_cos, rope_sin | [rows, head_dim / 2] | host |
    | position_ids | [max(chunk, slots)] rows of rope_cos | host |
    | write_indices | [slots] tokens already in each sequence's cache | host |
    | past_key_values.N.key, .value | [slots, kv_heads, max_seq_len, head_dim] | prefill, decode |
    | vision_cache | [rows, hidden_size], where there is one | copy |
    | logits | [slots, vocab_size] float32 | prefill, decode |

    The last `slots` rows of inputs_embeds are decode's, so that it can run between two chunks of
    somebody else's prefill.
    """

    allocations_after_start: int

    def staging(self, name: str, rows: int, start: int = 0) -> NDArray[Any]:
        """An array [rows, ...] to fill and hand to `write` with the same `start`: saves a copy."""
        ...

    def write(self, name: str, array: NDArray[Any], start: int = 0) -> None:
        """Copy rows into the tensor, from row `start` on. Raises ValueError beyond its end."""
        ...

    def run(self, phase: PhaseName, *, stage: int | None = None, **dims: int) -> None:
        """Enqueue a phase with these dims, or one of its stages alone. Raises ExecutorError.

        Stages of a picture are run in order; other phases may run between two of them.
        """
        ...

    def copy(self, source: str, row: int, target: str, target_row: int, rows: int) -> None:
        """Enqueue a copy of rows from one tensor to another whose rows are as wide.

        Raises ValueError beyond the end of either.
        """
        ...

    def read(self, name: str) -> NDArray[Any]:
        """Wait, then the whole tensor; a view, valid until the next run."""
        ...

    def close(self) -> None:
        """Give everything back; safe to call twice."""
        ...
