"""Sokoban: the rules beside reasoning-gym's own, the turns and their masks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from echo2.errors import ConfigError
from echo2_workers.environment import load_environment
from echo2_workers.environments.sokoban_board import Board

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs the extra envs")

CORRIDOR = "++++++\n+*@-X+\n++++++"
PAYLOAD = json.dumps({"board": CORRIDOR})


def sokoban(assets: Path, **settings: Any) -> Any:
    return load_environment("sokoban", settings, assets)


def test_the_rules_are_those_of_reasoning_gym() -> None:
    puzzles = reasoning_gym.create_dataset(
        "sokoban", seed=3, size=20, min_boxes=2, max_boxes=2, max_w=7, max_h=7
    )
    rng = random.Random(0)
    solved = 0
    for index in range(20):
        item = puzzles[index]
        text = "\n".join(item["metadata"]["gamestr"].replace(" ", "").strip().split("\n"))
        board = Board(text)
        for move in item["answer"]:
            board.move(move)
        assert board.is_solved
        moves = "".join(rng.choice("LRUD") for _ in range(15)) + item["answer"][: rng.randrange(9)]
        board = Board(text)
        for move in moves:
            board.move(move)
        assert board.is_solved == (puzzles.score_answer(moves, item) == 1.0)
        solved += board.is_solved
    assert solved < 20


def test_boxes_are_pushed_and_nothing_else_moves() -> None:
    board = Board(CORRIDOR)
    assert not board.move("L")
    assert not board.move("U")
    assert board.move("R")
    assert str(board) == "++++++\n+-*@X+\n++++++"
    assert board.move("R")
    assert (str(board), board.is_solved) == ("++++++\n+--*$+\n++++++", True)
    assert not board.move("R")
    over = Board("+++++\n+*X-+\n+++++")
    over.move("R")
    assert str(over) == "+++++\n+-%-+\n+++++"
    over.move("L")
    assert str(over) == "+++++\n+*X-+\n+++++"
    assert not Board("++++++\n+*@@-+\n++++++").move("R")


@pytest.mark.parametrize(
    "rows", ["", "+*+", "+++\n+-+\n+++", "++++\n+**+\n++++", "+++\n+*+\n++", "+++\n+*?\n+++", "*"]
)
def test_what_is_no_board_is_refused(rows: str) -> None:
    with pytest.raises(ValueError, match="no board"):
        Board(rows)


def test_turns_show_the_board_and_only_moves_are_in_the_loss(assets: Path, policy: Any) -> None:
    rollout = policy.play(sokoban(assets), PAYLOAD, ["lu", "r?", "r", "r"])
    assert policy.said(rollout) == ["lu", "r?", "r", "r"]
    assert policy.shown[0] == f"{CORRIDOR}\n"
    assert policy.shown[1] == f"{CORRIDOR}\nlu\n{CORRIDOR}\n"
    assert policy.shown[3].endswith("+-*@X+\n++++++\n")
    assert rollout.reward == 1.0
    assert rollout.info["lost_turns"] == 1


def test_turns_and_moves_are_limited_and_boxes_may_earn_credit(assets: Path, policy: Any) -> None:
    rollout = policy.play(sokoban(assets, turns=2, moves_per_turn=1), PAYLOAD, "RRRR")
    assert (rollout.reward, rollout.num_turns) == (1.0, 2)
    lost = policy.play(sokoban(assets, turns=3), PAYLOAD, "")
    assert (lost.reward, lost.num_turns) == (0.0, 3)
    two = json.dumps({"board": "+++++++\n+*@-X$+\n+++++++"})
    assert policy.play(sokoban(assets, box_credit=0.4), two, "L").reward == pytest.approx(0.2)


def test_puzzles_are_deterministic_and_held_out(assets: Path) -> None:
    first, second = sokoban(assets), sokoban(assets)
    train = [first.task("train", index) for index in range(60)]
    evals = [first.task("eval", index) for index in range(20)]
    assert train == [second.task("train", index) for index in range(60)]
    assert not set(train) & set(evals)
    for payload in evals:
        board = Board(json.loads(payload)["board"])
        assert (board.num_boxes, len(str(board))) == (1, 41)
    larger = json.loads(sokoban(assets, width=7, boxes=2).task("train", 0))["board"]
    assert Board(larger).num_boxes == 2
    assert {len(row) for row in larger.split("\n")} == {7}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"turns": 0}, "turns is 0"),
        ({"width": 4}, "from 5 to 20"),
        ({"boxes": 9}, "do not fit"),
        ({"box_credit": 1.0}, "box_credit"),
        ({"depth_max": 0}, "sokoban cannot be made"),
        ({"size": 4}, "takes width, height"),
    ],
)
def test_bad_settings_are_one_error(assets: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sokoban(assets, **settings)
