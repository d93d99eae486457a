"""A rollout as an OpenAI endpoint, driven by the real `openai` client over real HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from echo2.errors import EnvironmentError_
from echo2.types import Sampling, Span, Version
from echo2_workers.endpoint import ChatTokenizer, serve_openai
from echo2_workers.environment import Completion, Rollout, RolloutBuilder, check_rollout

openai = pytest.importorskip("openai")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


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


def text_of(tokenizer: ChatTokenizer, rollout: Rollout, *, sampled: bool) -> str:
    """The part of a trajectory that is (not) in the loss, special tokens too."""
    chosen = rollout.token_ids[rollout.loss_mask == sampled]
    return "".join(tokenizer.token_text(int(token_id)) for token_id in chosen)


# ------------------------------------------------------------------- one call, and many


async def test_an_answer_has_the_form_of_openai(says: Any, chat_tokenizer: ChatTokenizer) -> None:
    async with served(says("hello"), chat_tokenizer) as (session, client):
        answer = await client.chat.completions.create(
            model="gpt-4o", messages=[user("hi")], logprobs=True
        )
        assert [model.id async for model in client.models.list()] == ["policy"]
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "hello")
    assert choice.finish_reason == "stop"
    assert answer.model == "gpt-4o"
    assert answer.usage.completion_tokens == len("hello") + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len("hello") + 1
    assert [entry.token for entry in choice.logprobs.content] == [*"hello", "<|im_end|>"]
    assert choice.logprobs.content[0].logprob == pytest.approx(-1 - 1 / 64)
    rollout = session.rollout(reward=0.5)
    assert text_of(chat_tokenizer, rollout, sampled=True) == "hello<|im_end|>"
    assert rollout.reward == 0.5


async def test_turns_with_tools_become_one_trajectory_without_tokenizing_anew(
    says: Any, chat_tokenizer: ChatTokenizer, a_tool: dict[str, Any]
) -> None:
    # The policy's own white space and order of keys are not what the template would write.
    first = '<think>so</think>Well.\n<tool_call>{"arguments": {"a":1},"name":"add"}</tool_call> '
    policy = says(first, CALL, "It is 3.")
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, user("1+2?")]
    async with served(policy, chat_tokenizer) as (session, client):
        for result in ("1", "2"):
            answer = await client.chat.completions.create(
                model="m", messages=messages, tools=[a_tool]
            )
            [call] = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls"
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            messages.append(answer.choices[0].message)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[a_tool])
    assert answer.choices[0].message.content == "It is 3."
    rollout = check_rollout(session.rollout(reward=1.0))
    assert (rollout.num_turns, rollout.info["branches"]) == (3, 1)
    end = "<|im_end|>"
    said = text_of(chat_tokenizer, rollout, sampled=True)
    assert said == first + end + CALL + end + "It is 3." + end
    assert policy.prompt(2) == (
        f"<|im_start|>system\nBe brief.\n\n<tools>\n{json.dumps(a_tool)}\n</tools>{end}\n"
        f"<|im_start|>user\n1+2?{end}\n<|im_start|>assistant\n{first}{end}\n"
        f"<|im_start|>user\n<tool_response>\n1\n</tool_response>{end}\n<|im_start|>assistant\n"
        f"{CALL}{end}\n<|im_start|>user\n<tool_response>\n2\n</tool_response>{end}\n"
        "<|im_start|>assistant\n"
    )
    assert [span.version.step for span in rollout.spans] == [1, 2, 3]


async def test_the_trajectory_is_that_of_an_environment_that_plays_it_directly(
    chat_tokenizer: ChatTokenizer,
) -> None:
    def a_policy() -> Any:
        """What it samples depends on all tokens so far: any other prompt shows."""

        async def generate(token_ids: Any, sampling: Sampling | None = None) -> Completion:
            rng = np.random.default_rng([3, *token_ids])
            ids = (*rng.integers(10, 250, 12).tolist(), 258)
            logprobs = rng.uniform(-2, -1, 13).astype(np.float32)
            spans = (Span(Version(1, len(token_ids) % 3), 0, 13),)
            return Completion(ids, logprobs, spans, "stop")

        return generate

    assert chat_tokenizer.token_text(258) == "<|im_end|>"
    policy = a_policy()
    direct = RolloutBuilder(
        chat_tokenizer.encode("<|im_start|>user\n0<|im_end|>\n<|im_start|>assistant\n")
    )
    for turn in range(3):
        direct.add_completion(await policy(direct.token_ids))
        if turn < 2:
            more = f"\n<|im_start|>user\n{turn + 1}<|im_end|>\n<|im_start|>assistant\n"
            direct.add_observation(chat_tokenizer.encode(more))
    expected = direct.finish(1.0)
    messages: list[Any] = [user("0")]
    async with served(a_policy(), chat_tokenizer) as (session, client):
        for turn in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message, user(str(turn + 1))]
    rollout = session.rollout(1.0)
    np.testing.assert_array_equal(rollout.token_ids, expected.token_ids)
    np.testing.assert_array_equal(rollout.logprobs, expected.logprobs)
    np.testing.assert_array_equal(rollout.loss_mask, expected.loss_mask)
    assert rollout.spans == expected.spans
    assert (rollout.prompt_length, rollout.num_turns, rollout.finish) == (
        expected.prompt_length, expected.num_turns, expected.finish,
    )  # fmt: skip


async def test_a_turn_that_was_cut_off_gets_the_end_that_it_lacks(
    says: Any, chat_tokenizer: ChatTokenizer
) -> None:
    policy = says("to be conti", "x", ends=False)
    async with served(policy, chat_tokenizer) as (session, client):
        answer = await client.chat.completions.create(model="m", messages=[user("a")])
        assert answer.choices[0].finish_reason == "length"
        messages = [user("a"), answer.choices[0].message, user("b")]
        await client.chat.completions.create(model="m", messages=messages)
    assert "to be conti<|im_end|>\n<|im_start|>user\nb" in policy.prompt(1)
    rollout = session.rollout(0.0)
    assert text_of(chat_tokenizer, rollout, sampled=True) == "to be contix"


async def test_a_stop_string_cuts_text_and_tokens(says: Any, chat_tokenizer: ChatTokenizer) -> None:
    policy = says("one. two. three", "four")
    async with served(policy, chat_tokenizer) as (session, client):
        answer = await client.chat.completions.create(
            model="m", messages=[user("a")], stop=["!", ". t"]
        )
        assert answer.choices[0].message.content == "one"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len("one. t")
        messages = [user("a"), answer.choices[0].message, user("b")]
        await client.chat.completions.create(model="m", messages=messages)
    rollout = check_rollout(session.rollout(0.0))
    assert text_of(chat_tokenizer, rollout, sampled=True) == "one. tfour<|im_end|>"
    assert rollout.spans[0].end - rollout.spans[0].start == len("one. t")
    assert rollout.info["branches"] == 1


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_tells_the_same(
    says: Any, chat_tokenizer: ChatTokenizer, a_tool: dict[str, Any], usage: bool
) -> None:
    more = {"stream_options": {"include_usage": True}} if usage else {}
    async with served(says(f"So.{CALL}", "x"), chat_tokenizer) as (_, client):
        stream = await client.chat.completions.create(
            model="m", messages=[user("a")], tools=[a_tool], stream=True, **more
        )
        chunks = [chunk async for chunk in stream]
        stream = await client.completions.create(model="m", prompt="q", stream=True)
        text = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "So."
    [[call]] = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert call.function.name == "add"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert (chunks[-1].usage is not None) == usage
    assert text[0].choices[0].text == "x"


async def test_text_completions_continue_what_they_began(
    says: Any, chat_tokenizer: ChatTokenizer
) -> None:
    policy = says("bc", "ef", "h", ends=False)
    async with served(policy, chat_tokenizer) as (session, client):
        first = await client.completions.create(model="m", prompt="a", logprobs=0)
        assert first.choices[0].text == "bc"
        assert first.choices[0].logprobs.tokens == ["b", "c"]
        await client.completions.create(model="m", prompt="abcd")
        prompt = chat_tokenizer.encode("g")
        ids = await client.completions.create(model="m", prompt=prompt, max_tokens=3)
        assert ids.choices[0].text == "h"
        assert len(session.branches) == 2
    rollout = session.rollout(0.0, branch=session.branches[0])
    assert text_of(chat_tokenizer, rollout, sampled=True) == "bcef"
    assert text_of(chat_tokenizer, rollout, sampled=False) == "ad"
    assert policy.samplings[2] == Sampling(1.0, 1.0, 3)


# ---------------------------------------------------------------------- which trajectory


async def test_a_rewritten_history_begins_a_new_trajectory_and_the_last_is_trained(
    says: Any, chat_tokenizer: ChatTokenizer
) -> None:
    policy = says("long answer", "second")
    async with served(policy, chat_tokenizer) as (session, client):
        await client.chat.completions.create(model="m", messages=[user("a")])
        summary = {"role": "assistant", "content": "a summary"}
        await client.chat.completions.create(model="m", messages=[user("a"), summary, user("b")])
    assert "assistant\na summary<|im_end|>" in policy.prompt(1)
    last = session.rollout(1.0)
    assert text_of(chat_tokenizer, last, sampled=True) == "second<|im_end|>"
    assert (last.info["branches"], last.info["beginnings"]) == (2, 2)
    longest = session.rollout(1.0, trained="longest")
    assert text_of(chat_tokenizer, longest, sampled=True) == "long answer<|im_end|>"
    with pytest.raises(EnvironmentError_, match="2 calls make 2 trajectories"):
        session.rollout(1.0, trained="only")


async def test_a_question_asked_twice_opens_a_branch_that_shares_its_beginning(
    says: Any, chat_tokenizer: ChatTokenizer
) -> None:
    async with served(says("x", "y", "z"), chat_tokenizer) as (session, client):
        first = await client.chat.completions.create(model="m", messages=[user("a")])
        messages = [user("a"), first.choices[0].message, user("b")]
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=messages)
    told = [
        text_of(chat_tokenizer, session.rollout(0.0, branch=branch), sampled=True)
        for branch in session.branches
    ]
    assert told == ["x<|im_end|>y<|im_end|>", "x<|im_end|>z<|im_end|>"]
    assert session.rollout(0.0).info["beginnings"] == 1


async def test_several_conversations_at_once_do_not_mix(
    says: Any, chat_tokenizer: ChatTokenizer
) -> None:
    async with served(says("1", "2", "3"), chat_tokenizer) as (session, client):
        one = await client.chat.completions.create(model="m", messages=[user("a")])
        await client.chat.completions.create(model="m", messages=[user("other")])
        message = {**one.choices[0].message.model_dump(), "content": " 1\n"}  # as some clients do
        await client.chat.completions.create(model="m", messages=[user("a"), message, user("b")])
    assert [len(branch.calls) for branch in session.branches] == [1, 2]
    assert session.rollout(0.0).num_turns == 2


async def test_without_a_call_there_is_nothing_to_train(
    says: Any, chat_tokenizer: ChatTokenizer
) -> None:
    async with serve_openai(says(), chat_tokenizer) as session:
        with pytest.raises(EnvironmentError_, match="made no call"):
            session.rollout(1.0)


# ------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize(
    ("rule", "asked", "expected"),
    [
        ("run", {"temperature": 0.1, "top_p": 0.5}, None),
        ("run", {"max_tokens": 7}, Sampling(1.0, 1.0, 7)),
        ("run", {"max_completion_tokens": 5000}, None),
        ("request", {"temperature": 0.1, "max_tokens": 7}, Sampling(0.1, 1.0, 7)),
        ("request", {"top_p": 0.5}, Sampling(1.0, 0.5, 1000)),
    ],
)
async def test_the_run_decides_how_the_policy_is_sampled(
    says: Any, chat_tokenizer: ChatTokenizer, rule: Any, asked: Any, expected: Sampling | None
) -> None:
    policy = says("x")
    async with served(policy, chat_tokenizer, sampling=rule) as (_, client):
        await client.chat.completions.create(model="m", messages=[user("a")], **asked)
    assert policy.samplings == [expected]
