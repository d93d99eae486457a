"""Calls that the endpoint refuses, that fail, and that are given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from echo2.errors import EngineError
from echo2.types import Sampling
from echo2_workers.endpoint import ChatTokenizer, HermesTools, OpenAISession, serve_openai
from echo2_workers.engine import RequestError
from echo2_workers.environment import Completion
from echo2_workers.marker import current_group

openai = pytest.importorskip("openai")


@contextlib.asynccontextmanager
async def served(policy: Any, tokenizer: ChatTokenizer, **options: Any) -> AsyncIterator[Any]:
    """(session, client)"""
    async with (
        serve_openai(policy, tokenizer, **options) as session,
        openai.AsyncOpenAI(
            base_url=session.base_url,
            api_key=session.api_key,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=False),
        ) as client,
    ):
        yield session, client


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# ------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"n": 2}, "n"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_refused_with_the_field(
    says: Any, chat_tokenizer: ChatTokenizer, asked: dict[str, Any], param: str
) -> None:
    async with served(says(), chat_tokenizer) as (session, client):
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(**{"model": "m", "messages": [user("a")], **asked})
    assert raised.value.body["param"] == param
    assert raised.value.body["type"] == "invalid_request_error"
    assert session.num_calls == 0


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000,
        b'{"messages": 5}', b'{"messages": [null]}', b'{"messages": [{"role": "judge"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e99}',
        b'{"messages": [{"role": "user", "content": "a"}], "n": {"a": []}}',
        b'{"messages": [{"role": "user", "content": "a"}], "tools": "all"}',
        b'{"messages": [{"role": "user", "content": "a"}], "stop": [""]}',
        b'{"prompt": [-1]}', b'{"prompt": [99999999999]}', b'{"prompt": ["a", "b"]}',
        b'{"prompt": [1, "a"]}', b'{"prompt": [true]}',
    ],
)  # fmt: skip
async def test_whatever_a_client_sends_is_answered_with_400(
    says: Any, chat_tokenizer: ChatTokenizer, body: bytes
) -> None:
    async with (
        serve_openai(says(), chat_tokenizer) as session,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.api_key}"}) as client,
    ):
        path = "completions" if b"prompt" in body else "chat/completions"
        async with client.post(f"{session.base_url}/{path}", data=body) as response:
            answer = await response.json()
            assert (response.status, response.headers["x-should-retry"]) == (400, "false")
    assert answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


async def test_a_wrong_key_a_wrong_address_and_an_ended_rollout(
    says: Any, chat_tokenizer: ChatTokenizer
) -> None:
    async with served(says(), chat_tokenizer) as (session, client):
        stranger = client.with_options(api_key="guess")
        with pytest.raises(openai.AuthenticationError, match="not that of this rollout"):
            await stranger.models.list()
        with pytest.raises(openai.NotFoundError, match="served are POST"):
            await client.embeddings.create(model="m", input="x")
        async with served(says("x"), chat_tokenizer) as (other, _):
            assert other.base_url != session.base_url
            assert other.base_url.startswith("http://127.0.0.1:")
        gone = client.with_options(base_url=other.base_url, api_key=other.api_key)
        with pytest.raises(openai.NotFoundError, match="has ended"):
            await gone.models.list()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_no_version_can_serve_is_the_agents_to_handle(
    says: Any, chat_tokenizer: ChatTokenizer, stream: bool
) -> None:
    async with served(says(RequestError("too long"), "x"), chat_tokenizer) as (session, client):
        with pytest.raises(openai.BadRequestError, match="too long") as raised:
            await client.chat.completions.create(model="m", messages=[user("a")], stream=stream)
        assert raised.value.code == "context_length_exceeded"
        await client.chat.completions.create(model="m", messages=[user("b")])
    assert session.rollout(1.0).num_turns == 1


async def test_an_engine_that_fails_is_not_asked_again_and_is_the_rollouts_error(
    says: Any, chat_tokenizer: ChatTokenizer
) -> None:
    policy = says(EngineError("out of memory"))
    async with served(policy, chat_tokenizer) as (session, client):
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await client.chat.completions.create(model="m", messages=[user("a")])
        with pytest.raises(EngineError, match="out of memory"):
            session.rollout(1.0)
    assert len(policy.asked) == 1


# ------------------------------------------------------------------- calls that are given up


class Waiting:
    """A policy that never answers, and notices that it is no longer asked."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, token_ids: Any, sampling: Sampling | None = None) -> Completion:
        self.asked.set()
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_ends_with_its_client(chat_tokenizer: ChatTokenizer, stream: bool) -> None:
    policy = Waiting()
    async with asyncio.timeout(20), served(policy, chat_tokenizer) as (session, client):
        call = asyncio.create_task(
            client.chat.completions.create(model="m", messages=[user("a")], stream=stream)
        )
        await policy.asked.wait()
        call.cancel()
        await policy.cancelled.wait()
        assert session.num_calls == 0


async def test_a_call_ends_with_its_rollout(chat_tokenizer: ChatTokenizer) -> None:
    policy = Waiting()
    async with asyncio.timeout(20), served(Waiting(), chat_tokenizer) as (_, client):
        async with serve_openai(policy, chat_tokenizer) as session:
            own = client.with_options(base_url=session.base_url, api_key=session.api_key)
            call = asyncio.create_task(own.chat.completions.create(model="m", messages=[user("a")]))
            await policy.asked.wait()
        assert policy.cancelled.is_set()
        with pytest.raises(openai.NotFoundError, match="has ended"):
            await call


async def test_a_long_wait_keeps_its_stream_alive_and_may_still_fail(
    chat_tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2_workers.endpoint.server.KEEP_ALIVE_S", 0.01)
    released = asyncio.Event()

    async def generate(token_ids: Any, sampling: Sampling | None = None) -> Completion:
        await released.wait()
        raise RequestError("too long after all")

    async with asyncio.timeout(20), served(generate, chat_tokenizer) as (_, client):
        stream = await client.chat.completions.create(
            model="m", messages=[user("a")], stream=True
        )  # the headers have come, so a comment was sent
        released.set()
        with pytest.raises(openai.APIError, match="too long after all"):
            [chunk async for chunk in stream]


async def test_a_call_is_worked_on_in_the_context_of_its_rollout(
    says: Any, chat_tokenizer: ChatTokenizer
) -> None:
    seen = []

    async def generate(token_ids: Any, sampling: Sampling | None = None) -> Completion:
        seen.append(current_group.get())
        return await says("x")(token_ids)

    async def played(group: int) -> None:
        current_group.set(group)
        async with served(generate, chat_tokenizer) as (_, client):
            current_group.set(0)  # what the server was started in must not matter
            await client.chat.completions.create(model="m", messages=[user("a")])

    await asyncio.gather(*(asyncio.create_task(played(group)) for group in (7, 8)))
    assert sorted(seen) == [7, 8]


async def test_a_session_says_who_it_is(says: Any, chat_tokenizer: ChatTokenizer) -> None:
    async with serve_openai(says(), chat_tokenizer, tools=HermesTools()) as session:
        assert isinstance(session, OpenAISession)
        assert session.api_key.startswith("sk-echo2-")
        assert session.name in session.base_url
