"""Every error that edgevlm raises on purpose: what, the value, the limit, what to do.

EdgeVLMError
├── BundleError               a bundle is missing, damaged, or made for another board or version
├── ExecutorError             ONNX Runtime, TensorRT or CUDA refused; carries their words
├── RequestError              the caller's fault (HTTP 400)
│   ├── PromptTooLong
│   ├── TooManyImages
│   ├── BadImage
│   └── BadParameter
├── BusyError                 everything that may wait is waiting (HTTP 429)
└── BuildError                a checkpoint cannot become a bundle
    ├── UnsupportedCheckpoint
    └── OverBudget
"""


class EdgeVLMError(Exception):
    """Base of all errors of edgevlm; its text is one sentence made for the person who reads it."""


class BundleError(EdgeVLMError):
    """A bundle is missing, damaged, or made for another board or version."""


class ExecutorError(EdgeVLMError):
    """The library that runs the graphs refused; the message carries its words."""


class RequestError(EdgeVLMError):
    """The request cannot be served as it is; nothing was computed for it."""


class PromptTooLong(RequestError):
    """The prompt has more tokens than the bundle was built for."""


class TooManyImages(RequestError):
    """The request has more images than the bundle was built for."""


class BadImage(RequestError):
    """An image cannot be decoded, or breaks a limit."""


class BadParameter(RequestError):
    """A field of the request has a value that cannot be honoured."""


class BusyError(EdgeVLMError):
    """Everything that may wait is already waiting; try again later."""


class BuildError(EdgeVLMError):
    """A checkpoint cannot be turned into a bundle."""


class UnsupportedCheckpoint(BuildError):
    """The checkpoint is damaged, incomplete, or of a kind that is not supported."""


class OverBudget(BuildError):
    """The plan needs more memory than it may use."""
