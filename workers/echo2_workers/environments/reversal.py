"""Reversing a string of digits: "1234=" asks for "4321" and the end of the sequence.

    reward = (1 - bonus) * share + bonus * exact

where `share` is the part of the answer's positions whose digit is right (a missing position
is wrong), and `exact` is 1 when the sampled tokens are the whole answer followed by <eos>
and nothing else, else 0. So 1.0 is reached only by a perfect answer.
"""

from __future__ import annotations

import json
import random
from typing import Final

from echo2.types import Task
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.environments.splits import split_of
from echo2_workers.tokenizer import BOS, EOS, encode

DRAWS_MAX: Final = 10_000


class Reversal:
    """Strings of `digits` digits; about `eval_share` of all are held out, by `seed`."""

    name = "reversal"
    version = "1"
    replays = True

    def __init__(
        self, *, digits: int = 8, bonus: float = 0.2, seed: int = 0, eval_share: float = 0.2
    ) -> None:
        if not 3 <= digits <= 512:
            raise ValueError(f"digits is {digits}; it must be from 3 to 512")
        if not 0.0 <= bonus <= 1.0:
            raise ValueError(f"bonus is {bonus}; it must be from 0 to 1")
        if not 0.0 < eval_share < 1.0:
            raise ValueError(f"eval_share is {eval_share}; it must be above 0 and below 1")
        self._digits = digits
        self._bonus = bonus
        self._seed = seed
        self._eval_share = eval_share

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> str:
        rng = random.Random(f"{self._seed}:{split}:{index}")
        for _ in range(DRAWS_MAX):
            text = "".join(rng.choice("0123456789") for _ in range(self._digits))
            if split_of(text, seed=self._seed, eval_share=self._eval_share) == split:
                return json.dumps({"prompt": f"{text}=", "answer": text[::-1]})
        raise ValueError(
            f"no string for split {split!r} in {DRAWS_MAX} draws; eval_share is {self._eval_share}"
        )

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        content = json.loads(task.payload)
        answer = encode(content["answer"])
        rollout = RolloutBuilder([BOS, *encode(content["prompt"])])
        completion = await generate(rollout.token_ids)
        rollout.add_completion(completion)
        right = sum(a == b for a, b in zip(completion.token_ids, answer, strict=False))
        exact = completion.token_ids == (*answer, EOS)
        share = right / len(answer)
        return rollout.finish((1.0 - self._bonus) * share + self._bonus * exact)
