"""A request that was found to be possible: prompt, pictures, limits, and nothing that runs.

It may be submitted several times, each time for an answer of its own.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgevlm.prompt import Prompt
from edgevlm.sampling import SamplingParams


@dataclass(frozen=True, eq=False)
class Request:
    """What `VLM.prepare` gives and `VLM.submit` takes.

    | field      | meaning                                                           |
    |------------|-------------------------------------------------------------------|
    | pictures   | decoded and resized, RGB                                          |
    | digests    | of each picture, 16 bytes: size and pixels after decode and resize |
    | keys       | [prompt_tokens] int64, equal where tokens and pictures are equal  |
    | max_tokens | of the answer: what was asked, or what still fits the slot        |
    """

    prompt: Prompt = field(repr=False)
    pictures: tuple[Image.Image, ...]
    digests: tuple[bytes, ...] = field(repr=False)
    keys: NDArray[np.int64] = field(repr=False)
    params: SamplingParams
    max_tokens: int
    preprocess_ms: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, those of its pictures among them."""
        return len(self.prompt.ids)

    @property
    def image_tokens(self) -> int:
        """How many of them are image features."""
        return self.prompt.image_tokens

    @property
    def images(self) -> list[dict[str, Any]]:
        """Of each picture: its size, the size that was used, its tokens."""
        return [
            {"original": list(image.size), "used": list(picture.size), "tokens": run.length}
            for image, picture, run in zip(
                self.prompt.images, self.pictures, self.prompt.image_runs, strict=True
            )
        ]

    def with_seed(self, seed: int) -> "Request":
        """The same with another seed, for a second answer that is not the first."""
        return dataclasses.replace(self, params=dataclasses.replace(self.params, seed=seed))
