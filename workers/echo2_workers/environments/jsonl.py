"""`jsonl`: prompts and answers from a file of one's own, one turn each.

The file is read where the learner runs, and only there: tasks travel to the workers inside
their leases, so that no worker needs it. Held out are the problems of `eval_path`, or without
one a share of `path` by a hash of the prompt; a prompt that is held out is never trained on,
also where it stands in the file twice.

`score = "math"` compares with math-verify (2/4 is 0.5), in a process that is killed when a
check takes longer than `check_timeout_s`; "exact" compares the text. The reward is 1.0 or 0.0.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo2.errors import ConfigError
from echo2.types import Task
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.environments.answers import AnswerRule
from echo2_workers.environments.chat import Chat
from echo2_workers.environments.draws import check_eval_share
from echo2_workers.environments.extras import require
from echo2_workers.environments.math_checks import MathChecks
from echo2_workers.environments.problems_file import Problem, read_problems
from echo2_workers.environments.splits import split_of


class Jsonl:
    """`path`, `eval_path`: from the folder that the learner was started in. `epochs` None:
    endless passes over the training problems, each in an order of its own."""

    name = "jsonl"
    version = "1"
    replays = True

    def __init__(
        self,
        *,
        assets: Path | None,
        path: str,
        eval_path: str = "",
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        epochs: int | None = None,
        seed: int = 0,
        eval_share: float = 0.1,
        answer: str = "whole",
        score: str = "math",
        check_timeout_s: float = 5.0,
        prompt: str = "{prompt}",
        system: str = "",
        chat: bool | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_eval_share(eval_share)
        if score not in ("math", "exact"):
            raise ValueError(f'score is {score!r}; allowed are "math" and "exact"')
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be at least 1, or left out for endless")
        if "{prompt}" not in prompt:
            raise ValueError(f"prompt is {prompt!r}; it must hold {{prompt}}")
        if score == "math":
            require("math_verify", extra="envs", environment=self.name)
        self._path, self._eval_path = Path(path), Path(eval_path) if eval_path else None
        self._fields = {"prompt_field": prompt_field, "answer_field": answer_field}
        self._epochs = epochs
        self._seed = seed
        self._eval_share = eval_share
        self._answer = AnswerRule(answer)
        self._checks = MathChecks(timeout_s=check_timeout_s) if score == "math" else None
        self._prompt = prompt
        self._chat = Chat(assets, chat=chat, system=system, options=chat_options)
        self._problems: dict[Split, list[Problem]] | None = None
        self._order: tuple[int, list[int]] = (-1, [])

    def num_tasks(self, split: Split) -> int | None:
        problems = self._read()[split]
        if split == "eval":
            return len(problems)
        return None if self._epochs is None else self._epochs * len(problems)

    def task(self, split: Split, index: int) -> str:
        problems = self._read()[split]
        epoch, position = divmod(index, len(problems))
        if split == "train":
            position = self._epoch_order(epoch, len(problems))[position]
        problem = problems[position]
        return json.dumps({"prompt": problem.prompt, "answer": problem.answer})

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        content = json.loads(task.payload)
        rollout = RolloutBuilder(
            self._chat.opening(self._prompt.replace("{prompt}", content["prompt"]))
        )
        completion = await generate(rollout.token_ids)
        rollout.add_completion(completion)
        said = self._answer.find(self._chat.decode(completion.token_ids))
        right = await self._is_right(said, content["answer"]) if said else False
        return rollout.finish(1.0 if right else 0.0, info={"answer": said})

    async def _is_right(self, said: str, wanted: str) -> bool:
        if said == wanted or self._checks is None:
            return said == wanted
        return await self._checks.equal(said, wanted)

    async def stop(self) -> None:
        """End the process of the checks (it ends with ours in any case)."""
        if self._checks is not None:
            await self._checks.stop()

    def _read(self) -> dict[Split, list[Problem]]:
        """Both splits. Only the learner comes here: a worker has its tasks from leases."""
        if self._problems is None:
            self._problems = self._parted()
        return self._problems

    def _parted(self) -> dict[Split, list[Problem]]:
        problems = read_problems(self._path, **self._fields)
        if self._eval_path is not None:
            evals = read_problems(self._eval_path, **self._fields)
            prompts = {problem.prompt for problem in evals}
            train = [problem for problem in problems if problem.prompt not in prompts]
        else:
            evals = [problem for problem in problems if self._split_of(problem) == "eval"]
            train = [problem for problem in problems if self._split_of(problem) == "train"]
        for split, some in (("train", train), ("eval", evals)):
            if not some:
                raise ConfigError(
                    f"{self._path}: of its {len(problems)} problems none is left for {split} "
                    f"(eval_path = {str(self._eval_path or '')!r}, eval_share = "
                    f"{self._eval_share}); add problems, or change these settings"
                )
        return {"train": train, "eval": evals}

    def _split_of(self, problem: Problem) -> Split:
        return split_of(problem.prompt, seed=self._seed, eval_share=self._eval_share)

    def _epoch_order(self, epoch: int, count: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(count))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
