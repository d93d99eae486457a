"""The environment of load tests: a fixed prompt, one turn, a reward that varies.

Made for the engine "null", whose tokens mean nothing: the reward is the parity of their sum,
so that groups have variance.
"""

from __future__ import annotations

from echo2.types import Task
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.tokenizer import BOS


class Null:
    """`prompt_tokens`: length of each prompt."""

    name = "null"
    version = "1"
    replays = True

    def __init__(self, *, prompt_tokens: int = 8) -> None:
        if prompt_tokens < 1:
            raise ValueError(f"prompt_tokens is {prompt_tokens}; it must be at least 1")
        self._prompt = [BOS] * prompt_tokens

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> str:
        return f'{{"split": "{split}", "index": {index}}}'

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        rollout = RolloutBuilder(self._prompt)
        completion = await generate(rollout.token_ids)
        rollout.add_completion(completion)
        return rollout.finish(float(sum(completion.token_ids) % 2))
