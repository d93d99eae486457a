"""An agent that speaks to an OpenAI client, trained as it is. Named in openai_agent.toml as
"openai_agent:CheckedSum"; a worker imports it from the folder of its configuration.

    echo2 run examples/openai_agent.toml
    echo2 rollouts runs/openai-agent --best

The policy is asked for a sum. What it says is a call of the tool `check`, whose answer is
"=" when the sum is right, and otherwise the question again: it has three turns. The agent
knows nothing of tokens, versions or log-probabilities: it has a client, and gives a reward.

The shipped model knows digits and signs only, so its tool calls cannot be JSON: `Checks`
says how they look in its text. A model that writes calls in the usual form needs no such class.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import openai

from echo2 import Task
from echo2_workers.endpoint import AgentEnvironment, Parsed, ToolCall
from echo2_workers.environment import Split

CHECK = {
    "type": "function",
    "function": {
        "name": "check",
        "description": "Tells whether the sum is right.",
        "parameters": {
            "type": "object",
            "properties": {"sum": {"type": "string"}},
            "required": ["sum"],
        },
    },
}


class Checks:
    """Digits alone are a call of `check`."""

    def parse(self, text: str) -> Parsed:
        if not text.isdecimal():
            return Parsed(text)
        return Parsed("", (ToolCall("check", json.dumps({"sum": text})),))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "".join(json.loads(call.arguments)["sum"] for call in calls)

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        return ""  # the model could not read it


class CheckedSum(AgentEnvironment):
    """Sums of two numbers below 100; 1.0 for the first answer being right, less for a later."""

    name = "checked-sum"
    version = "1"  # change it whenever tasks or rewards change
    tools = Checks()
    turns = 3

    def num_tasks(self, split: Split) -> int | None:
        return 100 if split == "eval" else None

    def task(self, split: Split, index: int) -> str:
        draw = random.Random(f"{split} {index}")
        return json.dumps({"a": draw.randrange(100), "b": draw.randrange(100)})

    async def agent(self, client: openai.AsyncOpenAI, task: Task) -> float:
        numbers = json.loads(task.payload)
        question = f"{numbers['a']:02d}+{numbers['b']:02d}="
        messages: list[Any] = [{"role": "user", "content": question}]
        for turn in range(self.turns):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[CHECK]
            )
            message = answer.choices[0].message
            messages.append(message)
            for call in message.tool_calls or []:
                said = json.loads(call.function.arguments)["sum"]
                right = int(said) == numbers["a"] + numbers["b"]
                content = "=" if right else f"\n{question}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                if right:
                    return 1.0 - 0.25 * turn
            if not message.tool_calls:
                return 0.0  # no number at all
        return 0.0
