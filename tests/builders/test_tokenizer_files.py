import json
import sys

import pytest

from builders.tokenizer_files import read_tokenizer_files
from edgevlm.errors import UnsupportedCheckpoint

TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<|end|>": 3}, "merges": []},
    "added_tokens": [{"id": 2, "content": "</s>"}],
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return tmp_path


def refused(path, *words):
    with pytest.raises(UnsupportedCheckpoint) as caught:
        read_tokenizer_files(path)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def tokenizer_config(path, **fields):
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return read_tokenizer_files(path)


def test_tokenizer_json_is_kept_as_it_is(files):
    assert read_tokenizer_files(files).tokenizer_json == (files / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("</s>", (2,)),
        ({"content": "<|end|>", "lstrip": False}, (3,)),  # an ordinary token of the vocabulary
        (None, ()),
        ("<|nowhere|>", ()),
    ],
)
def test_eos_of_the_tokenizer(files, token, expected):
    assert tokenizer_config(files, eos_token=token).eos_token_ids == expected


def test_chat_template_of_every_form(files):
    assert read_tokenizer_files(files).chat_template is None
    assert tokenizer_config(files, chat_template="one").chat_template == "one"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    assert tokenizer_config(files, chat_template=named).chat_template == "two"
    (files / "chat_template.json").write_text('{"chat_template": "three"}')
    assert read_tokenizer_files(files).chat_template == "three"
    (files / "chat_template.jinja").write_text("four\n")
    assert read_tokenizer_files(files).chat_template == "four\n"


def test_chat_template_that_is_wrong(files):
    for template, word in (([{"name": "rag", "template": ""}], "rag"), (7, "int")):
        (files / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        refused(files, "tokenizer_config.json", word)


def test_no_tokenizer_at_all(files):
    (files / "tokenizer.json").unlink()
    refused(files, "no tokenizer.json")


def test_older_tokenizer_without_transformers(files, monkeypatch):
    (files / "tokenizer.json").unlink()
    (files / "vocab.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(files, "transformers", "pip install transformers")


def test_older_tokenizer_is_converted(tmp_path):
    pytest.importorskip("transformers")
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    model = json.loads(read_tokenizer_files(tmp_path).tokenizer_json)["model"]
    assert model["vocab"]["ab"] == 2 and len(model["merges"]) == 1


def test_older_tokenizer_that_cannot_be_converted(files):
    pytest.importorskip("transformers")
    (files / "tokenizer.json").unlink()
    (files / "vocab.json").write_text("{not json")
    refused(files, "no tokenizer.json", "cannot convert")
