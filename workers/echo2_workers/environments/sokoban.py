"""`sokoban`: push every box onto a goal; several turns, each with a few moves.

The puzzles are reasoning-gym's; those of the eval split are held out by a hash of the board.
Each turn shows the board (`sokoban_board.py` tells the characters), the policy says up to
`moves_per_turn` moves as letters, such as "RRUL", and only these are in the loss. It ends when
the puzzle is solved, or after `turns` turns. A turn that is no moves is lost and changes nothing;
letters above `moves_per_turn` are not played.

    reward = 1                                           solved
           = box_credit * boxes on goals / boxes         else

so with box_credit = 0 the mean reward of an eval is the share that was solved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from echo2.errors import ConfigError
from echo2.types import Task
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.environments.answers import AnswerRule
from echo2_workers.environments.chat import Chat
from echo2_workers.environments.draws import check_eval_share, held_out_draw
from echo2_workers.environments.extras import require, versioned
from echo2_workers.environments.sokoban_board import Board

TURNS_MAX: Final = 256
_MOVES: Final = re.compile(r"[LRUD]+")
SYSTEM: Final = """\
You solve a Sokoban puzzle over several turns. Each message shows the board:
+ wall, - floor, X goal, @ box, $ box on a goal, * you, % you on a goal.
Push every box onto a goal; boxes cannot be pulled, and only one is pushed at a time.
Answer with your next moves and nothing else, as letters: L left, R right, U up, D down."""


class Sokoban:
    """Boards of `width` by `height` with `boxes` boxes; `depth_max`: longest solution that the
    generator looks for. `system` None: the rules where the model has a chat template."""

    name = "sokoban"
    version = versioned("1", "reasoning-gym", extra="envs", environment="sokoban")
    replays = True

    def __init__(
        self,
        *,
        assets: Path | None,
        width: int = 6,
        height: int = 6,
        boxes: int = 1,
        depth_max: int = 40,
        turns: int = 4,
        moves_per_turn: int = 4,
        box_credit: float = 0.0,
        seed: int = 0,
        eval_share: float = 0.2,
        answer: str = "whole",
        system: str | None = None,
        chat: bool | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_eval_share(eval_share)
        if not 1 <= turns <= TURNS_MAX or not 1 <= moves_per_turn <= 1000:
            raise ValueError(
                f"turns is {turns} and moves_per_turn {moves_per_turn}; they must be from 1 to "
                f"{TURNS_MAX} and to 1000"
            )
        if not 5 <= width <= 20 or not 5 <= height <= 20 or not 1 <= boxes <= 10:
            raise ValueError(
                f"width, height and boxes are {width}, {height} and {boxes}; they must be from 5 "
                "to 20, and from 1 to 10"
            )
        if boxes > (width - 2) * (height - 2) // 4:
            raise ValueError(f"{boxes} boxes do not fit on {width} x {height}; take fewer")
        if not 0.0 <= box_credit < 1.0:
            raise ValueError(f"box_credit is {box_credit}; it must be from 0 to below 1")
        package = require("reasoning_gym", extra="envs", environment=self.name)
        try:
            self._puzzles = package.create_dataset(
                "sokoban",
                seed=seed,
                size=2**31 - 1,
                **{"min_w": width, "max_w": width, "min_h": height, "max_h": height},
                **{"min_boxes": boxes, "max_boxes": boxes, "max_depth": depth_max},
            )
        except AssertionError as error:
            raise ConfigError(f"environment.settings: sokoban cannot be made: {error}") from error
        self._turns = turns
        self._moves_per_turn = moves_per_turn
        self._box_credit = box_credit
        self._seed = seed
        self._eval_share = eval_share
        self._answer = AnswerRule(answer)
        self._chat = Chat(assets, chat=chat, system=system, options=chat_options, rules=SYSTEM)

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> str:
        _, board = held_out_draw(
            split,
            index,
            seed=self._seed,
            eval_share=self._eval_share,
            make=self._board,
            content=str,
        )
        return json.dumps({"board": board})

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        board = Board(json.loads(task.payload)["board"])
        rollout = RolloutBuilder(self._chat.opening(_shown(board)))
        lost = 0
        for turn in range(self._turns):
            completion = await generate(rollout.token_ids)
            rollout.add_completion(completion)
            said = self._answer.find(self._chat.decode(completion.token_ids)) or ""
            moves = said.strip().upper()
            if not _MOVES.fullmatch(moves):
                moves = ""
                lost += 1
            for letter in moves[: self._moves_per_turn]:
                board.move(letter)
                if board.is_solved:
                    break
            if board.is_solved or turn == self._turns - 1:
                break
            rollout.add_observation(self._chat.observation(_shown(board), completion))
        credit = self._box_credit * board.num_on_goals / board.num_boxes
        return rollout.finish(
            1.0 if board.is_solved else credit, info={"board": str(board), "lost_turns": lost}
        )

    def _board(self, number: int) -> str:
        lines = self._puzzles[number]["metadata"]["gamestr"].replace(" ", "").strip().split("\n")
        return "\n".join(lines)


def _shown(board: Board) -> str:
    return f"{board}\n"
