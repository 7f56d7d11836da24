"""Messages and pictures become a prompt: ids, image runs, positions, keys to compare prefixes.

Reads picture headers only; nothing is decoded here. Knows nothing about executors, slots or limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm import messages as openai
from edgevlm.chat_template import ChatTemplate
from edgevlm.config import ModelConfig
from edgevlm.control_tokens import ControlTokens, unguessable_mark
from edgevlm.errors import BadParameter
from edgevlm.images import ImageSource, OpenImage
from edgevlm.positions import Grid, ImageRun, mrope_positions, plain_positions
from edgevlm.preprocess import image_grid
from edgevlm.tokenizer import Tokenizer

I64 = NDArray[np.int64]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Prompt:
    """What the runner needs to prefill.

    | field      | shape, dtype      | meaning                                        |
    |------------|-------------------|------------------------------------------------|
    | ids        | [n] int64         | image rows hold the image token's id           |
    | positions  | [1 or 3, n] int64 | "plain" or "mrope" (t, h, w)                   |
    | delta      | int               | position of a later token = its index + delta  |
    | image_runs | one per picture   | in order; `image` numbers `images` and `grids` |
    """

    ids: I64
    positions: I64
    delta: int
    image_runs: tuple[ImageRun, ...] = ()
    images: tuple[OpenImage, ...] = ()
    grids: tuple[Grid, ...] = ()

    @property
    def image_tokens(self) -> int:
        """Rows of the prompt that are image features."""
        return sum(run.length for run in self.image_runs)

    def keys(self, digests: Sequence[bytes]) -> I64:
        """[n] int64, equal where the content is equal: ids, and below zero the pictures.

        `digests`: `image_digest` of each picture (decoded or resized, but always the same of the
        two).
        """
        keys: I64 = self.ids.copy()
        for run in self.image_runs:
            number = int.from_bytes(digests[run.image][:8], "little") >> 1
            keys[run.start : run.start + run.length] = -1 - number
        return keys


class PromptBuilder:
    """Makes prompts for one model. Without a chat template only a plain text prompt is possible."""

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer, template: ChatTemplate | None = None
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._template = template
        self._control = ControlTokens(tokenizer)

    def build(
        self,
        prompt: "str | Messages",
        images: Sequence["ImageSource | OpenImage"] = (),
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A prompt from a question or messages. Raises BadParameter or BadImage.

        `variables` go to the template (`tools`, `enable_thinking`, ...). After a last assistant
        message a new assistant turn begins.
        """
        if self._template is None:
            return self._plain(prompt, images)
        sees = self._config.image_tokens is not None
        if isinstance(prompt, str):
            prompt = openai.from_text(prompt, len(images))
        normal, opened = openai.normalise(prompt, images, sees, self._config.image_processor)
        given = {"messages": normal, "variables": dict(variables or {})}
        mark = unguessable_mark(given)
        marked = self._control.mark(given, mark)
        text = self._template.render(marked["messages"], add_generation_prompt, marked["variables"])
        return self._with_images(self._control.encode(text, mark), opened)

    def build_text(self, text: str) -> Prompt:
        """A prompt from text alone, as a base model continues it. Raises BadParameter.

        Control tokens written in it stay plain text; the BOS that the tokenizer adds is added.
        """
        return self._with_images(self._tokenizer.encode(text, add_special_tokens=True), [])

    def _plain(self, prompt: "str | Messages", images: Sequence[Any]) -> Prompt:
        """A base model: the text as it is, with the BOS that its tokenizer adds."""
        if not isinstance(prompt, str):
            raise BadParameter(
                "this bundle has no chat template (a base model): send one plain text prompt"
            )
        if images:
            raise BadParameter(
                f"this bundle has no chat template to place {len(images)} images in; send text only"
            )
        return self.build_text(prompt)

    def _with_images(self, ids: list[int], opened: list[OpenImage]) -> Prompt:
        """Each image placeholder repeated once per feature, and everyone's position."""
        if not ids:
            raise BadParameter("the prompt is empty; send at least one character")
        row = np.array(ids, np.int64)
        config = self._config
        if config.image_tokens is None or config.image_processor is None:
            return Prompt(row, plain_positions(len(row)), 0)
        merge = config.image_processor.merge_size
        grids = tuple(image_grid(config.image_processor, image.size) for image in opened)
        lengths = [t * h * w // merge**2 for t, h, w in grids]
        places = np.flatnonzero(row == config.image_tokens.image)
        if len(places) != len(opened):
            raise BadParameter(
                f"the chat template made {len(places)} image places for {len(opened)} images; "
                "put images into user messages"
            )
        repeats = np.ones(len(row), np.int64)
        repeats[places] = lengths
        starts = np.cumsum(repeats) - repeats
        runs = tuple(
            ImageRun(int(starts[place]), length, i)
            for i, (place, length) in enumerate(zip(places, lengths, strict=True))
        )
        row = np.repeat(row, repeats)
        if config.text.rope.scheme == "plain":
            positions, delta = plain_positions(len(row)), 0
        else:
            positions, delta = mrope_positions(len(row), runs, grids, merge)
        return Prompt(row, positions, delta, runs, tuple(opened), grids)
