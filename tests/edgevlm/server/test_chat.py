"""/v1/chat/completions: what goes in is honoured, what comes out has OpenAI's shape."""

import base64
import io
from typing import Any

import pytest

from tests.edgevlm.server.conftest import Stage
from tests.serving import Reply, Running
from tests.tiny_models import picture


def data_url(width: int = 60, height: int = 40, seed: int = 0) -> str:
    file = io.BytesIO()
    picture(width, height, seed).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def streamed(reply: Reply, index: int = 0) -> str:
    """The text of one choice."""
    found = ""
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            if choice["index"] == index:
                found += choice["delta"].get("content") or ""
    return found


def test_an_answer_has_openais_shape_with_timings_beside_usage(stage: Stage) -> None:
    reply = stage.running.chat("Hi", max_tokens=20)
    assert reply.status == 200
    answer = reply.json
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6  # five letters and the end
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert answer["timings"]["first_token_ms"] > 0
    assert reply.headers["x-request-id"] == answer["id"]


def test_a_stream_says_the_same_as_the_whole(stage: Stage) -> None:
    stage.play("Grüße, 世界 🎉!")
    whole = stage.running.chat("Hi").json
    reply = stage.running.chat("Hi", stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert streamed(reply) == whole["choices"][0]["message"]["content"] == "Grüße, 世界 🎉!"
    usage = reply.events[-2]
    assert usage["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][name] == whole["usage"][name]


@pytest.mark.parametrize(
    "part",
    [
        lambda url: {"type": "image_url", "image_url": {"url": url}},
        lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        lambda url: {"type": "image_url", "image_url": url},
        lambda url: {"type": "image", "image": url},
        lambda url: {"type": "image", "url": url},
        lambda url: {"type": "image", "image_url": {"url": url}},
    ],
    ids=["object", "detail", "string", "image", "url", "image with object"],
)
def test_every_form_of_a_picture_counts_the_same_tokens(stage: Stage, part: Any) -> None:
    reply = stage.running.chat([part(data_url()), {"type": "text", "text": "What?"}])
    assert reply.status == 200, reply.json
    usage = reply.json["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 6  # scaled up to 84x56
    plain = stage.running.chat("What?").json["usage"]
    # vision_start and vision_end stand round the picture's rows.
    assert usage["prompt_tokens"] == plain["prompt_tokens"] + 6 + 2


def test_n_answers_count_the_prompt_once_and_seeds_repeat(live: Running) -> None:
    ask: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 6}
    first, second = live.chat("Hi", **ask).json, live.chat("Hi", **ask).json
    texts = [c["message"]["content"] for c in first["choices"]]
    assert [c["index"] for c in first["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [c["message"]["content"] for c in second["choices"]]
    one = live.chat("Hi", max_tokens=1).json["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens"] == one
