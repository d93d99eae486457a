"""One rollout as an OpenAI endpoint: its calls go to the policy, and become trajectories.

Life-cycle: made by `serve_openai` -> chat / complete, as often as the agent likes, also at
once -> `rollout(reward)` -> closed. What was sampled is recorded when the policy has
answered; a call whose client went away before is not.

The run's own temperature and top_p hold, whatever the agent asks for, unless `sampling` is
"request": behaviour logprobs describe the distribution that was sampled, and the learner
computes its own at the run's temperature, so another one would bias what it learns.
`max_tokens` of the agent holds where it is below the run's.
"""

from __future__ import annotations

import contextvars
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from echo2.errors import EnvironmentError_
from echo2.types import Sampling
from echo2_workers.endpoint.chat_tokenizer import ChatTokenizer
from echo2_workers.endpoint.conversation import Branch, Call, Calls, Conversation, cut
from echo2_workers.endpoint.errors import ApiError
from echo2_workers.endpoint.requests import ChatRequest, TextRequest, Turn
from echo2_workers.endpoint.tools import Parsed, ToolCall, ToolFormat
from echo2_workers.engine import RequestError
from echo2_workers.environment import SPANS_MAX, Completion, Finish, Generate, Rollout

Trained = Literal["last", "longest", "only"]
FinishReason = Literal["stop", "length", "tool_calls"]
CALLS_MAX: Final = SPANS_MAX
"""A trajectory holds no more spans, and each call has one at least."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client is told of one call. `text` is without stop string and special tokens."""

    call: Call
    text: str
    parsed: Parsed
    call_ids: tuple[str, ...]
    finish: FinishReason
    num_prompt_tokens: int

    @property
    def completion(self) -> Completion:
        return self.call.completion


class OpenAISession:
    """`base_url` and `api_key` are for the agent's client; both are of this rollout alone."""

    def __init__(
        self,
        generate: Generate,
        tokenizer: ChatTokenizer,
        *,
        tools: ToolFormat,
        sampling: Literal["run", "request"],
        base_url: str,
        name: str,
    ) -> None:
        self.base_url = base_url
        self.name = name
        self.api_key = f"sk-echo2-{secrets.token_urlsafe(24)}"
        self.tokenizer = tokenizer
        self.failure: Exception | None = None
        """Why the policy could not answer, when it was neither the agent's nor the model's."""
        self.context = contextvars.copy_context()
        """Of the rollout: work for its calls is done in it."""
        self._generate = generate
        self._tools = tools
        self._sampling_rule = sampling
        self._sampling: Sampling = getattr(generate, "sampling", Sampling())
        self._calls = Calls()
        self._started = 0

    # ------------------------------------------------------------------------- calls

    async def chat(self, request: ChatRequest) -> Answer:
        """Raises ApiError, and whatever `generate` raises."""
        turns = request.turns()
        shown = self._shown(turns, request.shown_tools)
        arguments = request.chat_template_kwargs or {}
        tools = request.shown_tools if self._template_knows("tools") else []
        key = ("chat", repr(request.shown_tools), repr(arguments))
        conversation = tuple(turn.matter for turn in turns)

        def matched(earlier: Conversation) -> bool:
            return len(earlier) < len(conversation) and conversation[: len(earlier)] == earlier

        parent = self._calls.continued(key, matched)
        new_ids: list[int] | None = None
        if parent is not None:
            # `shown` may have one message more than `turns`, before all others.
            first = len(parent.conversation) + len(shown) - len(turns)
            text = self.tokenizer.render_after(
                shown[: first - 1], shown[first - 1], shown[first:], tools, arguments
            )
            new_ids = None if text is None else self._after(parent, text)
        if new_ids is None:
            parent = None
            new_ids = self.tokenizer.encode(self.tokenizer.render(shown, tools, arguments))
        completion, prompt_length = await self._sample(parent, new_ids, request)
        completion, text, stopped = self._stopped(completion, request.stops)
        parsed = self._tools.parse(text) if request.shown_tools else Parsed(text)
        turn = Turn("assistant", parsed.content, tuple((c.name, c.arguments) for c in parsed.calls))
        call = self._record(key, (*conversation, turn.matter), parent, new_ids, completion)
        finish = _finish(completion, stopped)
        call_ids = tuple(f"call{call.index:03d}{i:02d}" for i in range(len(parsed.calls)))
        if call_ids and finish == "stop":
            finish = "tool_calls"
        return Answer(call, parsed.content, parsed, call_ids, finish, prompt_length)

    async def complete(self, request: TextRequest) -> Answer:
        """The same for /v1/completions, whose prompt is text or token ids."""
        given = request.prompt
        prompt: Conversation
        if isinstance(given, str):
            prompt, key = given, ("text",)
        else:
            prompt, key = tuple(given), ("ids",)
        parent = self._calls.continued(key, lambda earlier: prompt[: len(earlier)] == earlier)
        new = prompt[len(parent.conversation) if parent else 0 :]
        if isinstance(new, str):
            new_ids = self.tokenizer.encode(new, add_special_tokens=parent is None)
        else:
            new_ids = list(new)
        completion, prompt_length = await self._sample(parent, new_ids, request)
        completion, text, stopped = self._stopped(completion, request.stops)
        whole: Conversation
        if isinstance(prompt, str):
            whole = prompt + self.tokenizer.decode(completion.token_ids)
        else:
            whole = (*prompt, *completion.token_ids)
        call = self._record(key, whole, parent, new_ids, completion)
        return Answer(call, text, Parsed(text), (), _finish(completion, stopped), prompt_length)

    # -------------------------------------------------------------------- trajectories

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Every trajectory that was played, in the order of their last calls."""
        return self._calls.branches()

    def rollout(
        self,
        reward: float,
        *,
        trained: Trained = "last",
        branch: Branch | None = None,
        finish: Finish | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """The scored trajectory. Of several branches the one that was played last, the one
        with most sampled tokens ("longest"), or an error ("only"); or name the `branch`.

        Raises EnvironmentError_ when there is none to train.
        """
        if self.failure is not None:
            raise self.failure
        branches = self.branches
        if not branches:
            raise EnvironmentError_(
                "the agent made no call that the policy answered, so there is nothing to train; "
                f"it must use the base_url that it is given ({self.base_url})"
            )
        if branch is None:
            if trained == "only" and len(branches) > 1:
                raise EnvironmentError_(
                    f"{len(self._calls)} calls make {len(branches)} trajectories "
                    f"({self._calls.num_roots} beginnings): the agent rewrote its history, asked "
                    'twice, or had several conversations; use trained = "last" or "longest", or '
                    "name the branch"
                )
            branch = branches[-1]
            if trained == "longest":
                branch = max(branches, key=lambda found: found.num_sampled)
        told = {
            "calls": len(self._calls),
            "branches": len(branches),
            "beginnings": self._calls.num_roots,
        }
        return branch.builder().finish(reward, finish=finish, info={**told, **(info or {})})

    # -------------------------------------------------------------------------- inside

    def _template_knows(self, variable: str) -> bool:
        return self.tokenizer.template.speaks_of(variable)

    def _shown(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The messages for the template. One that knows nothing of tools gets their description
        as the first message, and calls and answers of tools as text."""
        if self._template_knows("tool_calls"):
            return [turn.message() for turn in turns]
        shown = []
        for turn in turns:
            if turn.calls:
                calls = self._tools.render([ToolCall(*call) for call in turn.calls])
                content = f"{turn.content}\n{calls}" if turn.content else calls
                turn = replace(turn, content=content, calls=(), call_ids=())
            if turn.role == "tool" and not self.tokenizer.template.is_plain:
                turn = replace(turn, role="user", tool_call_id="", name="")
            shown.append(turn.message())
        description = self._tools.describe(tools) if tools else ""
        if description and not self._template_knows("tools"):
            if shown[0]["role"] == "system":
                shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{description}"}
            else:
                shown.insert(0, {"role": "system", "content": description})
        return shown

    def _after(self, parent: Call, text: str) -> list[int]:
        """Tokens after the parent's answer. The end of the turn that the template writes is
        left out where the policy has sampled one itself."""
        ids = self.tokenizer.encode(text)
        eos_ids, sampled = self.tokenizer.eos_ids, parent.completion.token_ids
        if ids and ids[0] in eos_ids and sampled and sampled[-1] in eos_ids:
            return ids[1:]
        return ids

    async def _sample(
        self, parent: Call | None, new_ids: Sequence[int], request: ChatRequest | TextRequest
    ) -> tuple[Completion, int]:
        """(what the policy sampled, number of tokens before it)."""
        if self._started >= CALLS_MAX:
            raise ApiError(
                f"this rollout made {CALLS_MAX} calls; a trajectory holds no more",
                code="too_many_calls",
            )
        self._started += 1
        token_ids = [*(parent.ids() if parent else ()), *new_ids]
        try:
            completion = await self._generate(token_ids, self._wanted(request))
        except RequestError as error:
            raise ApiError(str(error), code="context_length_exceeded") from error
        except Exception as error:
            self.failure = error
            raise
        return completion, len(token_ids)

    def _wanted(self, request: ChatRequest | TextRequest) -> Sampling | None:
        """None where the run's own sampling holds in all."""
        run = self._sampling
        wanted = replace(run, max_tokens=min(run.max_tokens, request.tokens_max or run.max_tokens))
        if self._sampling_rule == "request":
            if request.temperature is not None:
                wanted = replace(wanted, temperature=request.temperature)
            if request.top_p is not None:
                wanted = replace(wanted, top_p=request.top_p)
        return None if wanted == run else wanted

    def _stopped(
        self, completion: Completion, stops: Sequence[str]
    ) -> tuple[Completion, str, bool]:
        """(what is kept, its text before the stop string, whether there was one). Tokens after
        the one that completes a stop string are dropped: they were sampled for nothing."""
        text = self.tokenizer.decode(completion.token_ids)
        starts = [(start, stop) for stop in stops if (start := text.find(stop)) >= 0]
        if not starts:
            return completion, text, False
        start, stop = min(starts)
        low, high = 1, len(completion.token_ids)
        while low < high:  # the first number of tokens whose text holds the stop string
            middle = (low + high) // 2
            if stop in self.tokenizer.decode(completion.token_ids[:middle]):
                high = middle
            else:
                low = middle + 1
        return cut(completion, low), text[:start], True

    def _record(
        self,
        key: tuple[Any, ...],
        conversation: Conversation,
        parent: Call | None,
        new_ids: Sequence[int],
        completion: Completion,
    ) -> Call:
        call = Call(len(self._calls), key, conversation, parent, tuple(new_ids), completion)
        self._calls.add(call)
        return call


def _finish(completion: Completion, stopped: bool) -> FinishReason:
    return "stop" if stopped or completion.finish == "stop" else "length"
