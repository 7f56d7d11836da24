"""edgevlm: vision-language models on small machines, in memory planned beforehand.

from edgevlm import VLM, SamplingParams
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgevlm.errors import (
        BadImage,
        BadParameter,
        BuildError,
        BundleError,
        BusyError,
        EdgeVLMError,
        ExecutorError,
        OverBudget,
        PromptTooLong,
        RequestError,
        TooManyImages,
        UnsupportedCheckpoint,
    )
    from edgevlm.generation import Delta, Generation
    from edgevlm.sampling import SamplingParams
    from edgevlm.vlm import VLM

__version__ = "0.1.0"

# Where each public name lives. It is imported when it is asked for, so that `edgevlm --help` and
# scripts that need one error class do not wait for numpy and tokenizers.
_HOMES = {
    "VLM": "vlm",
    "Delta": "generation",
    "Generation": "generation",
    "SamplingParams": "sampling",
    "BadImage": "errors",
    "BadParameter": "errors",
    "BuildError": "errors",
    "BundleError": "errors",
    "BusyError": "errors",
    "EdgeVLMError": "errors",
    "ExecutorError": "errors",
    "OverBudget": "errors",
    "PromptTooLong": "errors",
    "RequestError": "errors",
    "TooManyImages": "errors",
    "UnsupportedCheckpoint": "errors",
}

__all__ = [
    "VLM",
    "BadImage",
    "BadParameter",
    "BuildError",
    "BundleError",
    "BusyError",
    "Delta",
    "EdgeVLMError",
    "ExecutorError",
    "Generation",
    "OverBudget",
    "PromptTooLong",
    "RequestError",
    "SamplingParams",
    "TooManyImages",
    "UnsupportedCheckpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edgevlm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"edgevlm.{_HOMES[name]}"), name)
