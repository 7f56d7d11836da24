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
│   └── ShuttingDown          no new requests; running ones end (HTTP 503)
├── DeadlineExceeded          the request's own deadline passed (HTTP 504)
├── Cancelled                 the caller took the request back
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
    """Everything that may wait is already waiting; try again later.

    `retry_after`: seconds after which there may be room, by what requests took so far; None: not
    known.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShuttingDown(BusyError):
    """The model is about to be closed: nothing new is taken, what runs ends soon."""


class DeadlineExceeded(EdgeVLMError):
    """The request was not finished when its own deadline passed."""


class Cancelled(EdgeVLMError):
    """The request was taken back by whoever asked."""


class BuildError(EdgeVLMError):
    """A checkpoint cannot be turned into a bundle."""


class UnsupportedCheckpoint(BuildError):
    """The checkpoint is damaged, incomplete, or of a kind that is not supported."""


class OverBudget(BuildError):
    """The plan needs more memory than it may use."""
