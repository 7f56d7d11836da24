"""The shape of every error."""

from pydantic import BaseModel


class ErrorInfo(BaseModel):
    """What went wrong; `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """{"error": {...}}"""

    error: ErrorInfo
