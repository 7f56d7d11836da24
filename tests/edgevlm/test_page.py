"""The page as a file: it stands alone, its policy lets it run, text cannot become markup."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from edgevlm.page import INDEX, load_page

TEXT = INDEX.read_text(encoding="utf-8")


class Document(HTMLParser):
    """Tags with their attributes, and the text of script and style."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside in self.inline:
            self.inline[self._inside].append(data)
            self._inside = ""


@pytest.fixture(scope="module")
def document() -> Document:
    parsed = Document()
    parsed.feed(TEXT)
    parsed.close()
    return parsed


def test_the_policy_allows_the_pages_own_code_and_nothing_else(document: Document) -> None:
    page = load_page()
    assert page.body == TEXT.encode()
    rules = dict(rule.split(" ", 1) for rule in page.headers["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    for tag, pieces in document.inline.items():
        (piece,) = pieces
        digest = base64.b64encode(hashlib.sha256(piece.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not any(word in str(rules) for word in ("unsafe", "*", "http"))


def test_it_asks_nobody_else(document: Document) -> None:
    for tag, given in document.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = given.get(name) or ""
            assert value == "" or value.startswith(("#", "data:")), f"<{tag} {name}={value}>"
    urls = set(re.findall(r"https?://[^\s'\"]+", TEXT))
    assert urls == {"http://www.w3.org/2000/svg"}, "a name, which nobody fetches"
    assert "@import" not in TEXT and "url(" not in TEXT
    paths = re.findall(r"\bcall\(\"([^\"]+)\"", TEXT)
    assert set(paths) == {"/v1/chat/completions", "/v1/models", "/v1/memory"}


def test_nothing_is_inline_that_the_policy_would_refuse(document: Document) -> None:
    for tag, given in document.tags:
        for name in given:
            assert name != "style" and not name.startswith("on"), f"<{tag} {name}>"


def test_text_never_becomes_markup() -> None:
    found = re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setHTML|DOMParser|srcdoc"
        r"|createContextualFragment|\beval\b|new Function|javascript:",
        TEXT,
    )
    assert not found


def test_every_part_that_the_script_names_is_there(document: Document) -> None:
    ids = [str(given["id"]) for _, given in document.tags if "id" in given]
    assert len(ids) == len(set(ids))
    named = set(re.findall(r"\bat\(\"([^\"]+)\"\)", TEXT))
    assert named <= set(ids)
    references = {
        str(given[name]).lstrip("#")
        for _, given in document.tags
        for name in ("for", "aria-labelledby", "aria-controls")
        if name in given
    }
    assert references <= set(ids)
