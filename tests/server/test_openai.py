"""The official OpenAI client, on a quarter of the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import InternalServerError, OpenAI

from tests.server.conftest import Breaking
from tests.server.serving import Server, serving

MESSAGES: list[Any] = [{"role": "user", "content": "Say something."}]


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(packed: Server) -> OpenAI:
    return client_of(packed)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["packed"]


def test_chat_and_streamed_chat_agree(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "packed", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    parts = client.chat.completions.create(**options, stream=True)
    pieces = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert whole.usage.completion_tokens > 0
    assert "".join(pieces) == (whole.choices[0].message.content or "")


def test_completions(client: OpenAI) -> None:
    reply = client.completions.create(model="packed", prompt="Once upon a time", max_tokens=8, temperature=0)
    assert reply.usage is not None and 0 < reply.usage.completion_tokens <= 8


def test_embeddings(tmp_path: Path, model: Path, quarter: list[str]) -> None:
    with serving(tmp_path, model, *quarter, "--embeddings", "--pooling", "mean") as server:
        reply = client_of(server).embeddings.create(model="packed", input=["one", "two"])
        assert [len(item.embedding) for item in reply.data] == [256, 256]


def test_a_read_error_is_an_internal_server_error(breaking: Breaking) -> None:
    breaking.fault.write_text("fail")
    with pytest.raises(InternalServerError, match="expert"):
        client_of(breaking.server).chat.completions.create(model="packed", messages=MESSAGES, max_tokens=16)
