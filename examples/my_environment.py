"""An environment of one's own: tasks, a rollout, a reward. Named in embed.toml as
"my_environment:NearSum"; a worker imports it from the folder of its configuration.

The policy is asked for a sum, and the reward says how close its answer came.
"""

from __future__ import annotations

import json
import random

from echo2 import Task
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.tokenizer import BOS, decode, encode


class NearSum:
    """Sums of two numbers below `largest`; reward 1.0 for the right answer, less the farther
    it is off, 0.0 for what is no number."""

    name = "near-sum"
    version = "1"  # change it whenever tasks or rewards change

    def __init__(self, *, largest: int = 100) -> None:
        self.largest = largest

    def num_tasks(self, split: Split) -> int | None:
        return None  # endless

    def task(self, split: Split, index: int) -> str:
        """The same for the same arguments, on every machine."""
        draw = random.Random(f"{split} {index}")
        a, b = draw.randrange(self.largest), draw.randrange(self.largest)
        return json.dumps({"a": a, "b": b})

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        """One turn; more would be more calls of `generate`, with observations between."""
        numbers = json.loads(task.payload)
        prompt = f"{numbers['a']:02d}+{numbers['b']:02d}="
        rollout = RolloutBuilder([BOS, *encode(prompt)])
        completion = await generate(rollout.token_ids)
        rollout.add_completion(completion)
        said = decode(completion.token_ids)
        return rollout.finish(reward=self.reward(said, numbers["a"] + numbers["b"]))

    def reward(self, said: str, wanted: int) -> float:
        if not said.isdecimal():
            return 0.0
        return max(0.0, 1.0 - abs(int(said) - wanted) / self.largest)
