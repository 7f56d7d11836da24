"""Runs a bundle once, in a process of its own: the last step of a build for this machine.

A text prompt and, where the model sees, a small picture; the logits must be finite (the sampler
refuses others). Not a measure of quality: `edgevlm verify` is to be that.
"""

import json
import sys

from PIL import Image

from edgevlm.errors import EdgeVLMError
from edgevlm.sampling import SamplingParams
from edgevlm.vlm import VLM


def main(path: str) -> int:
    """Exit code 0, or 1 with one line on stderr."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    try:
        with VLM(path) as vlm:
            answer = vlm.generate("hello", params=params)
            if vlm.bundle.manifest.model.vision is not None:
                picture = Image.new("RGB", (64, 48), (200, 30, 30))
                answer = vlm.generate("hello", images=[picture], params=params)
            sys.stdout.write(json.dumps(answer.memory) + "\n")
    except EdgeVLMError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
