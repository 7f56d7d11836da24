"""The page at /: one file, and the headers that let it run what it holds and nothing else."""

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

INDEX = Path(__file__).with_name("index.html")


@dataclass(frozen=True)
class Page:
    """What `GET /` answers: bytes of UTF-8 HTML, and headers by name."""

    body: bytes
    headers: dict[str, str]


def load_page(path: Path = INDEX) -> Page:
    """Read the page; its Content-Security-Policy names its own style and script by their hashes."""
    text = path.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(text, "script"),
        "style-src": _hashes(text, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Page(text.encode(), headers)


def _hashes(text: str, tag: str) -> str:
    """The sources a policy allows for every inline `tag` of a document."""
    inside = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (hashlib.sha256(piece.encode()).digest() for piece in inside)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
