"""edgevlm: vision-language models on small machines, in memory planned beforehand.

from edgevlm import VLM, SamplingParams
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgevlm.answer import Answer
    from edgevlm.errors import (
        BadImage,
        BadParameter,
        BuildError,
        BundleError,
        BusyError,
        Cancelled,
        DeadlineExceeded,
        EdgeVLMError,
        ExecutorError,
        OverBudget,
        PromptTooLong,
        RequestError,
        ShuttingDown,
        TooManyImages,
        UnsupportedCheckpoint,
    )
    from edgevlm.generation import Delta, Generation
    from edgevlm.request import Request
    from edgevlm.sampling import SamplingParams
    from edgevlm.stats import Stats
    from edgevlm.vlm import VLM

__version__ = "0.1.0"

# Where each public name lives. It is imported when it is asked for, so that `edgevlm --help` and
# scripts that need one error class do not wait for numpy and tokenizers.
_HOMES = {
    "VLM": "vlm",
    "Answer": "answer",
    "Delta": "generation",
    "Generation": "generation",
    "Request": "request",
    "SamplingParams": "sampling",
    "Stats": "stats",
    "BadImage": "errors",
    "BadParameter": "errors",
    "BuildError": "errors",
    "BundleError": "errors",
    "BusyError": "errors",
    "Cancelled": "errors",
    "DeadlineExceeded": "errors",
    "EdgeVLMError": "errors",
    "ExecutorError": "errors",
    "OverBudget": "errors",
    "PromptTooLong": "errors",
    "RequestError": "errors",
    "ShuttingDown": "errors",
    "TooManyImages": "errors",
    "UnsupportedCheckpoint": "errors",
}

__all__ = [
    "VLM",
    "Answer",
    "BadImage",
    "BadParameter",
    "BuildError",
    "BundleError",
    "BusyError",
    "Cancelled",
    "DeadlineExceeded",
    "Delta",
    "EdgeVLMError",
    "ExecutorError",
    "Generation",
    "OverBudget",
    "PromptTooLong",
    "Request",
    "RequestError",
    "SamplingParams",
    "ShuttingDown",
    "Stats",
    "TooManyImages",
    "UnsupportedCheckpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edgevlm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"edgevlm.{_HOMES[name]}"), name)
