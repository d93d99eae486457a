"""`reasoning_gym:DATASET`: the procedural tasks of reasoning-gym, one turn each, scored by the
data set's own `score_answer`.

A task names the item's number and its question; the worker makes the item again from the
settings and compares the question, since items hold more than JSON can. With `holdout =
"question"` the splits are parted by a hash of the question, so that no question of an eval is
ever trained on, however few there are; "seed" only parts the seeds, for data sets that are slow
to generate (see `draws.py`).

    reward = score_answer(answer)                                 where it is above 0
           = number_credit * max(0, 1 - |a - b| / max(1, |b|))    for a number a that is wrong
           = 0                                                    else, and without an answer
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from echo2.errors import ConfigError, EnvironmentError_
from echo2.types import Task
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.environments.answers import AnswerRule
from echo2_workers.environments.chat import Chat
from echo2_workers.environments.draws import check_eval_share, draw_number, held_out_draw
from echo2_workers.environments.extras import require, versioned

SIZE: Final = 2**31 - 1
"""Size that data sets are made with: they compute an item from seed and number."""
SIZES: Final = {
    "acre": 1000,
    "gsm_symbolic": 100_000,
    "list_functions": 100_000,
    "word_ladder": 1000,
}
"""Those that make a list of all their items first, so that numbers are taken modulo this."""
ITEMS_KEPT: Final = 64


class ReasoningGym:
    """`generator`: settings of the data set; `answer`: see answers.py; `prompt`: the text of
    the user's turn, with {question} in it; `question_pattern`: a regular expression whose one
    group is what is shown of the question (all of it where nothing matches); `chat`, `system` and
    `chat_options`: see chat.py."""

    version = versioned("1", "reasoning-gym", extra="envs", environment="reasoning_gym")
    replays = True

    def __init__(
        self,
        dataset: str,
        *,
        assets: Path | None,
        generator: Mapping[str, Any] | None = None,
        seed: int = 0,
        eval_share: float = 0.2,
        holdout: str = "question",
        answer: str = "whole",
        number_credit: float = 0.0,
        prompt: str = "{question}",
        question_pattern: str = "",
        system: str = "",
        chat: bool | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = f"reasoning_gym:{dataset}"
        check_eval_share(eval_share)
        if holdout not in ("question", "seed"):
            raise ValueError(f'holdout is {holdout!r}; allowed are "question" and "seed"')
        if not 0.0 <= number_credit < 1.0:
            raise ValueError(f"number_credit is {number_credit}; it must be from 0 to below 1")
        if "{question}" not in prompt:
            raise ValueError(f"prompt is {prompt!r}; it must hold {{question}}")
        try:
            self._pattern = re.compile(question_pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"question_pattern is {question_pattern!r}: {error}") from error
        if question_pattern and self._pattern.groups != 1:
            raise ValueError(
                f'question_pattern is {question_pattern!r}; it must have one group, as ": (.*)" has'
            )
        self._seed = seed
        self._eval_share = eval_share
        self._holdout = holdout
        self._answer = AnswerRule(answer)
        self._number_credit = number_credit
        self._prompt = prompt
        self._size = SIZES.get(dataset, SIZE)
        self._dataset = _dataset(dataset, dict(generator or {}), seed)
        self._items: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._chat = Chat(assets, chat=chat, system=system, options=chat_options)

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> str:
        if self._holdout == "seed":
            number = draw_number(split, index, 0)
            item = self._item(number)
        else:
            number, item = held_out_draw(
                split,
                index,
                seed=self._seed,
                eval_share=self._eval_share,
                make=self._item,
                content=lambda item: str(item["question"]),
            )
        return json.dumps({"number": number, "question": item["question"]})

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        content = json.loads(task.payload)
        item = self._item(content["number"])
        if item["question"] != content["question"]:
            raise EnvironmentError_(
                f"{self.name}: item {content['number']} reads {item['question']!r} here and "
                f"{content['question']!r} at the learner; use the same settings and Python"
            )
        prompt = self._prompt.replace("{question}", self._question(item))
        rollout = RolloutBuilder(self._chat.opening(prompt))
        completion = await generate(rollout.token_ids)
        rollout.add_completion(completion)
        said = self._answer.find(self._chat.decode(completion.token_ids))
        return rollout.finish(self._score(said, item), info={"answer": said})

    def _question(self, item: dict[str, Any]) -> str:
        question = str(item["question"])
        found = self._pattern.search(question) if self._pattern.groups else None
        return found[1] if found else question

    def _score(self, said: str | None, item: dict[str, Any]) -> float:
        if said is None:
            return 0.0
        try:
            score = float(self._dataset.score_answer(answer=said, entry=item))
        except Exception:  # a scorer that cannot read what the policy said has scored it
            score = 0.0
        if score > 0.0 or not self._number_credit:
            return score if math.isfinite(score) else 0.0
        return self._number_credit * _nearness(said, str(item["answer"]))

    def _item(self, number: int) -> dict[str, Any]:
        """The item; the last ones are kept, since a group asks G times for the same."""
        item = self._items.get(number)
        if item is None:
            item = self._items[number] = self._dataset[number % self._size]
            if len(self._items) > ITEMS_KEPT:
                self._items.popitem(last=False)
        return item


def _nearness(said: str, wanted: str) -> float:
    try:
        a, b = float(said), float(wanted)
    except ValueError:
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0
    return max(0.0, 1.0 - abs(a - b) / max(1.0, abs(b)))


def _dataset(name: str, generator: dict[str, Any], seed: int) -> Any:
    package = require("reasoning_gym", extra="envs", environment=f"reasoning_gym:{name}")
    known = require("reasoning_gym.factory", extra="envs", environment=name).DATASETS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise ConfigError(
            f"environment.name = 'reasoning_gym:{name}': reasoning-gym has no such data set; "
            + (f"near are {', '.join(near)}; " if near else "")
            + f"it knows {len(known)}, among them chain_sum, countdown, leg_counting"
        )
    reserved = sorted({"seed", "size"} & set(generator))
    if reserved:
        raise ConfigError(
            f"environment.settings: generator sets {', '.join(reserved)}, which echo2 sets itself; "
            "use settings.seed for other tasks"
        )
    try:
        return package.create_dataset(name, seed=seed, size=SIZES.get(name, SIZE), **generator)
    except (TypeError, ValueError, AssertionError) as error:
        fields = [f for f in known[name][1].__dataclass_fields__ if f not in ("seed", "size")]
        raise ConfigError(
            f"environment.settings: generator = {generator!r} does not fit {name} "
            f"({type(error).__name__}: {error}); it takes {', '.join(fields)}"
        ) from error
