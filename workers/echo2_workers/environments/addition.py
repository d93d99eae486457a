"""Two-digit addition in characters: "07+45=" asks for "052" and the end of the sequence.

The reward is 1.0 for exactly these tokens, else 0.0. All 10,000 pairs are parted by a seeded
hash, so that no pair of the eval split is ever trained on. Training tasks are endless: each
pass over the pairs has an order of its own.
"""

from __future__ import annotations

import json
import random
from typing import Final

from echo2.types import Task
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.environments.splits import split_of
from echo2_workers.tokenizer import BOS, EOS, encode

NUMBERS: Final = 100


class Addition:
    """`eval_share` of the pairs are held out; `seed` decides which, and the order."""

    name = "addition"
    version = "1"
    replays = True

    def __init__(self, *, seed: int = 0, eval_share: float = 0.2) -> None:
        if not 0.0 < eval_share < 1.0:
            raise ValueError(f"eval_share is {eval_share}; it must be above 0 and below 1")
        self._seed = seed
        self._pairs: dict[Split, list[tuple[int, int]]] = {"train": [], "eval": []}
        for a in range(NUMBERS):
            for b in range(NUMBERS):
                split = split_of(f"{a}+{b}", seed=seed, eval_share=eval_share)
                self._pairs[split].append((a, b))
        self._order: tuple[Split, int, list[int]] = ("train", -1, [])

    def num_tasks(self, split: Split) -> int | None:
        return len(self._pairs["eval"]) if split == "eval" else None

    def task(self, split: Split, index: int) -> str:
        pairs = self._pairs[split]
        epoch, position = divmod(index, len(pairs))
        a, b = pairs[self._epoch_order(split, epoch)[position]]
        return json.dumps({"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"})

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        content = json.loads(task.payload)
        rollout = RolloutBuilder([BOS, *encode(content["prompt"])])
        completion = await generate(rollout.token_ids)
        rollout.add_completion(completion)
        exact = completion.token_ids == (*encode(content["answer"]), EOS)
        return rollout.finish(1.0 if exact else 0.0)

    def _epoch_order(self, split: Split, epoch: int) -> list[int]:
        if self._order[:2] != (split, epoch):
            order = list(range(len(self._pairs[split])))
            random.Random(f"{self._seed}:{split}:{epoch}").shuffle(order)
            self._order = (split, epoch, order)
        return self._order[2]
