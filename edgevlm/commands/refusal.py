"""An answer that is a refusal and has its figures all the same."""

from typing import Any

from edgevlm.errors import EdgeVLMError


class Refused(EdgeVLMError):
    """Exit status 1 with this error, and with --json the document on stdout nevertheless."""

    def __init__(self, error: EdgeVLMError, document: dict[str, Any]) -> None:
        super().__init__(str(error))
        self.document = document
