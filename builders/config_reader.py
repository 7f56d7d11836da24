"""A typed reader over a checkpoint's JSON; refuses by key what is missing, mistyped, unsupported.

A key whose value is null counts as absent, as in transformers. Knows no family.
"""

from __future__ import annotations

import builtins
import enum
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from edgevlm.errors import UnsupportedCheckpoint


class _Missing(enum.Enum):
    REQUIRED = enum.auto()


REQUIRED: Final = _Missing.REQUIRED
T = TypeVar("T")


class ConfigReader:
    """Reads one JSON object; `where` names it in messages, as in "config.json: text_config"."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise UnsupportedCheckpoint(
                f"{where} is {_show(data)}, not a JSON object; download the checkpoint again"
            )
        self.data: Mapping[str, Any] = data
        self.where = where

    def __contains__(self, key: str) -> builtins.bool:
        return self.data.get(key) is not None

    def value(self, key: str, default: Any = REQUIRED) -> Any:
        """The value as it stands; absent and null give `default`."""
        found = self.data.get(key)
        if found is not None:
            return found
        if default is REQUIRED:
            raise UnsupportedCheckpoint(
                f"{self.where} has no {key!r}, which this family needs; "
                "the file is incomplete or of another family, download the checkpoint again"
            )
        return default

    def int(
        self, key: str, default: T | _Missing = REQUIRED, minimum: builtins.int = 1
    ) -> builtins.int | T:
        """An integer of at least `minimum` (2.0 counts: some writers make sizes floats)."""
        found: object = self.value(key, default)
        if found is default and not isinstance(default, _Missing):
            return default
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or found < minimum:
            raise self.mistyped(key, found, f"an integer of at least {minimum}")
        return found

    def float(self, key: str, default: T | _Missing = REQUIRED) -> builtins.float | T:
        """A finite number."""
        found: object = self.value(key, default)
        if found is default and not isinstance(default, _Missing):
            return default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.mistyped(key, found, "a number")
        if found != found or abs(found) == float("inf"):
            raise self.mistyped(key, found, "a finite number")
        return float(found)

    def bool(self, key: str, default: T | _Missing = REQUIRED) -> builtins.bool | T:
        """True or false."""
        found: object = self.value(key, default)
        if found is default and not isinstance(default, _Missing):
            return default
        if not isinstance(found, bool):
            raise self.mistyped(key, found, "true or false")
        return found

    def ints(self, key: str, default: T | _Missing = REQUIRED) -> tuple[builtins.int, ...] | T:
        """A list of non-negative integers."""
        found: object = self.value(key, default)
        if found is default and not isinstance(default, _Missing):
            return default
        items = found if isinstance(found, list | tuple) else None
        if items is None or any(type(item) is not int or item < 0 for item in items):
            raise self.mistyped(key, found, "a list of non-negative integers")
        return tuple(items)

    def floats(self, key: str, default: T | _Missing = REQUIRED) -> tuple[builtins.float, ...] | T:
        """A list of numbers."""
        found: object = self.value(key, default)
        if found is default and not isinstance(default, _Missing):
            return default
        items = found if isinstance(found, list | tuple) else None
        if items is None or any(type(item) not in (int, float) for item in items):
            raise self.mistyped(key, found, "a list of numbers")
        return tuple(float(item) for item in items)

    def token_ids(self, key: str) -> tuple[builtins.int, ...]:
        """Token ids written as one integer, a list, null, or not at all."""
        found = self.value(key, ())
        ids = tuple(found) if isinstance(found, list | tuple) else (found,)
        if any(type(item) is not int or item < 0 for item in ids):
            raise self.mistyped(key, found, "a token id or a list of them")
        return ids

    def section(self, key: str) -> ConfigReader:
        """The JSON object under `key`, which must be there."""
        return ConfigReader(self.value(key), f"{self.where}: {key}")

    def require(self, key: str, *allowed: Any, default: Any = REQUIRED) -> Any:
        """The value, refused by key and value unless it is one of `allowed`."""
        found: object = self.value(key, default)
        if not any(type(found) is type(choice) and found == choice for choice in allowed):
            wanted = " or ".join(_show(choice) for choice in allowed)
            raise UnsupportedCheckpoint(
                f"{self.where} has {key} {_show(found)}, and only {wanted} is supported; "
                "use a checkpoint that has it"
            )
        return found

    def mistyped(self, key: str, found: Any, wanted: str) -> UnsupportedCheckpoint:
        """The error for a value of the wrong kind."""
        return UnsupportedCheckpoint(
            f"{self.where} has {key} {_show(found)}, not {wanted}; correct the file"
        )


def _show(value: Any) -> str:
    words = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return words[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
