import pytest

from builders.config_reader import ConfigReader
from edgevlm.errors import UnsupportedCheckpoint

READER = ConfigReader(
    {
        "n": 3,
        "f": 0.5,
        "b": True,
        "none": None,
        "list": [1, 2],
        "big": 2.0,
        "s": "silu",
        "long": "x" * 200,
        "deep": {"n": 4},
    },
    "config.json",
)


def refused(call, *words):
    with pytest.raises(UnsupportedCheckpoint) as caught:
        call()
    message = str(caught.value)
    assert message.startswith("config.json") and all(word in message for word in words), message


def test_reads_what_is_there():
    assert READER.int("n") == 3 and READER.int("big") == 2 and type(READER.int("big")) is int
    assert READER.float("f") == 0.5 and READER.float("n") == 3.0
    assert type(READER.float("n")) is float
    assert READER.bool("b") is True
    assert READER.ints("list") == (1, 2) and READER.floats("list") == (1.0, 2.0)
    assert READER.token_ids("list") == (1, 2) and READER.token_ids("n") == (3,)
    assert READER.section("deep").int("n") == 4


@pytest.mark.parametrize("key", ["none", "absent"])
def test_absent_and_null_give_the_default(key):
    assert key not in READER
    assert READER.int(key, 7) == 7 and READER.int(key, None) is None
    assert READER.float(key, 1.5) == 1.5 and READER.bool(key, False) is False
    assert READER.ints(key, ()) == () and READER.floats(key, None) is None
    assert READER.token_ids(key) == () and READER.require(key, "a", "b", default="b") == "b"


@pytest.mark.parametrize("method", ["int", "float", "bool", "ints", "floats", "section", "value"])
@pytest.mark.parametrize("key", ["none", "absent"])
def test_absent_without_default_is_refused(method, key):
    refused(lambda: getattr(READER, method)(key), repr(key))


@pytest.mark.parametrize(
    ("method", "key", "words"),
    [
        ("int", "f", ("f 0.5", "integer")),
        ("int", "b", ("b true",)),
        ("int", "s", ("s 'silu'",)),
        ("float", "b", ("b true", "number")),
        ("float", "s", ("s 'silu'",)),
        ("bool", "n", ("n 3", "true or false")),
        ("ints", "n", ("n 3", "list")),
        ("ints", "deep", ("deep",)),
        ("floats", "s", ("s 'silu'",)),
        ("token_ids", "s", ("s 'silu'", "token id")),
        ("token_ids", "b", ("b true",)),
        ("section", "n", ("config.json: n is 3",)),
        ("int", "long", ("xxx...",)),
    ],
)
def test_mistyped_is_refused_by_key_and_value(method, key, words):
    refused(lambda: getattr(READER, method)(key), *words)


def test_minimum():
    assert READER.int("n", minimum=3) == 3
    refused(lambda: READER.int("n", minimum=4), "n 3", "at least 4")


def test_require_tells_true_from_one():
    assert READER.require("s", "gelu", "silu") == "silu"
    refused(lambda: READER.require("s", "gelu", "relu"), "s 'silu'", "'gelu' or 'relu'")
    refused(lambda: READER.require("b", 1), "b true")


def test_section_names_its_place():
    refused(lambda: READER.section("deep").int("m"), "config.json: deep", "'m'")
    refused(lambda: ConfigReader([], "config.json"), "[]", "not a JSON object")
