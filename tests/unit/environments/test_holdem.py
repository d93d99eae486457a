"""Hold'em: the rules, the masks, what becomes of nonsense, and that chips stay chips."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from echo2.errors import ConfigError
from echo2_workers.environment import load_environment
from echo2_workers.environments.holdem_opponents import OPPONENTS, hand_strength
from echo2_workers.environments.holdem_table import (
    Action,
    Table,
    View,
    parse_action,
    shuffled_deck,
)

pokerkit = pytest.importorskip("pokerkit", reason="needs the extra envs")

ACES_HOLD = "AsAh" + "2c7d" + "KsQd9h4c3s"
"""Seat 0 has aces, and the board helps nobody."""


def a_payload(deck: str = ACES_HOLD, *, seat: int = 0) -> str:
    return json.dumps({"decks": [deck], "seat": seat, "deal": 0})


def holdem(assets: Path, **settings: Any) -> Any:
    return load_environment("holdem", settings, assets)


def play_out(table: Table, action: Action) -> None:
    while table.actor is not None:
        table.act(action)


# --------------------------------------------------------------------------- the table


def test_a_hand_goes_round_as_the_rules_say() -> None:
    table = Table(ACES_HOLD, stack=40)
    assert table.actor == 1  # the button first, before the flop
    assert table.view() == View("2c7d", "", 1, 3, 1, 39, 4, 40)
    assert table.act(Action("raise", 6))
    assert table.view() == View("AsAh", "", 0, 8, 4, 38, 10, 40)
    assert table.act(Action("call"))
    assert table.view() == View("AsAh", "KsQd9h", 0, 12, 0, 34, 2, 34)
    play_out(table, Action("call"))
    assert (table.payoff(0), table.payoff(1)) == (6, -6)


@pytest.mark.parametrize(
    ("action", "allowed", "payoff"),
    [
        (Action("fold"), True, 1),
        (None, False, 1),
        (Action("raise", 3), False, 1),  # less than the smallest raise
        (Action("raise", 41), False, 1),
    ],
)
def test_what_is_not_allowed_is_a_fold_where_there_is_a_bet(
    action: Action | None, allowed: bool, payoff: int
) -> None:
    table = Table(ACES_HOLD, stack=40)
    assert table.act(action) is allowed
    assert table.actor is None
    assert (table.payoff(0), table.payoff(1)) == (payoff, -payoff)


@pytest.mark.parametrize(("action", "allowed"), [(None, False), (Action("fold"), True)])
def test_and_a_check_where_that_is_free(action: Action | None, allowed: bool) -> None:
    table = Table(ACES_HOLD, stack=40)
    table.act(Action("call"))
    assert table.act(action) is allowed
    assert table.actor == 0
    assert table.view().board == "KsQd9h"


def test_all_in_goes_to_the_showdown_and_ties_are_split() -> None:
    table = Table(ACES_HOLD, stack=40)
    table.act(Action("all-in"))
    assert table.view().raise_max == 0
    table.act(Action("all-in"))  # a call: there is nothing left to raise
    assert table.actor is None
    assert (table.payoff(0), table.payoff(1)) == (40, -40)
    same = Table("2s3h" + "2c3d" + "AsKsQdJhTc", stack=40)
    play_out(same, Action("all-in"))
    assert (same.payoff(0), same.payoff(1)) == (0, 0)


def test_payoffs_are_those_of_pokerkits_own_showdown() -> None:
    rng = random.Random(5)
    for _ in range(25):
        deck = shuffled_deck(rng)
        table = Table(deck, stack=40)
        play_out(table, Action("call"))
        first, second = (
            pokerkit.StandardHighHand.from_game(hole, deck[8:]) for hole in (deck[:4], deck[4:8])
        )
        sign = (first > second) - (first < second)
        assert (table.payoff(0), table.payoff(1)) == (2 * sign, -2 * sign)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("f", Action("fold")),
        (" C\n", Action("call")),
        ("r12", Action("raise", 12)),
        ("A", Action("all-in")),
        ("", None),
        (None, None),
        ("r", None),
        ("r-3", None),
        ("r9999999", None),
        ("cc", None),
        ("fold", None),
        ("r١", None),
    ],
)
def test_actions_are_read_strictly(text: str | None, action: Action | None) -> None:
    assert parse_action(text) == action


# --------------------------------------------------------------------------- opponents


@pytest.mark.parametrize("name", sorted(OPPONENTS))
def test_opponents_play_allowed_actions_and_the_same_for_the_same_seed(name: str) -> None:
    def hands(seed: int) -> list[int]:
        rng, payoffs = random.Random(seed), []
        for _ in range(40):
            table = Table(shuffled_deck(rng), stack=40)
            while table.actor is not None:
                assert table.act(OPPONENTS[name](table.view(), rng))
            assert table.payoff(0) + table.payoff(1) == 0
            payoffs.append(table.payoff(0))
        return payoffs

    assert hands(1) == hands(1)


def test_a_tight_player_folds_rags_and_raises_aces() -> None:
    rags, aces = View("2c7d", "", 1, 3, 1, 39, 4, 40), View("AsAh", "", 1, 3, 1, 39, 4, 40)
    rng = random.Random(0)
    assert OPPONENTS["tight"](rags, rng) == Action("fold")
    assert OPPONENTS["tight"](aces, rng).kind == "raise"
    hands = ["2c7d", "Tc7d", "AsKs", "AsAh"]
    strengths = [hand_strength(View(hole, "", 0, 3, 1, 39, 4, 40)) for hole in hands]
    assert strengths == sorted(strengths)
    board = "KsQd9h"
    made = ["2c7d", "9c2d", "KhQh"]
    strengths = [hand_strength(View(hole, board, 0, 3, 1, 39, 4, 40)) for hole in made]
    assert strengths == sorted(strengths)


# ------------------------------------------------------------------------- environment


def test_a_hand_has_a_turn_for_each_decision_and_only_they_are_in_the_loss(
    assets: Path, policy: Any
) -> None:
    rollout = policy.play(holdem(assets), a_payload(), ["r6", "r12", "c", "a"])
    assert policy.said(rollout) == ["r6", "r12", "c", "a"]
    assert policy.shown[0] == "AsAh - O 4 0 38>"
    assert policy.shown[1] == "AsAh - O 4 0 38>r6\nAsAh KsQd9h O 12 0 34>"
    assert rollout.num_turns == 4
    assert rollout.reward == 20.0  # big blinds: the whole stack, with aces against a caller
    assert policy.play(holdem(assets, reward_scale=0.1), a_payload(), "a").reward == 2.0
    assert policy.play(holdem(assets), a_payload(seat=1), "a").reward == -20.0


def test_nonsense_costs_a_penalty_and_is_a_check_or_a_fold(assets: Path, policy: Any) -> None:
    free = policy.play(holdem(assets), a_payload(), ["zzz", "c", "c", "c"])
    assert (free.reward, free.num_turns) == (0.5, 4)  # one big blind won, half a one paid
    assert free.info == {"chips_bb": 1.0, "illegal": 1}
    folded = policy.play(holdem(assets, illegal_penalty=2.0), a_payload(seat=1), "zzz")
    assert (folded.reward, folded.num_turns) == (-2.5, 1)


def test_several_hands_and_few_decisions(assets: Path, policy: Any) -> None:
    environment = holdem(assets, hands=3, decisions_max=2)
    payload = environment.task("train", 0)
    assert len(json.loads(payload)["decks"]) == 3
    rollout = policy.play(environment, payload, "c")
    assert rollout.num_turns == 6
    assert abs(rollout.reward) <= 1.0


def test_an_opponent_lets_the_policy_decide_before_it_folds(assets: Path, policy: Any) -> None:
    rags = "AsAh" + "2c7d" + "KsQd9h4c3s"
    rollout = policy.play(holdem(assets, opponent="tight"), a_payload(rags), "c")
    assert rollout.num_turns >= 1


def test_deals_are_paired_deterministic_and_held_out(assets: Path) -> None:
    first, second = holdem(assets), holdem(assets)
    train = [json.loads(first.task("train", index)) for index in range(200)]
    evals = [json.loads(first.task("eval", index)) for index in range(100)]
    assert train == [json.loads(second.task("train", index)) for index in range(200)]
    assert train[0]["decks"] == train[1]["decks"]
    assert [train[0]["seat"], train[1]["seat"]] == [0, 1]
    decks = [{each["decks"][0] for each in some} for some in (train, evals)]
    assert (len(decks[0]), len(decks[1])) == (100, 50)
    assert not decks[0] & decks[1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"opponent": "shark"}, "allowed are caller, random, tight, aggressive"),
        ({"hands": 0}, "hands is 0"),
        ({"stack_bb": 1}, "from 2 to 1000"),
        ({"hands": 32, "decisions_max": 9}, "at most 256 turns"),
        ({"illegal_penalty": -1.0}, "illegal_penalty"),
        ({"blinds": 3}, "takes opponent, hands"),
        ({"answer": "x"}, "answer"),
    ],
)
def test_bad_settings_are_one_error(assets: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        holdem(assets, **settings)
