"""Scripted opponents at the table: each maps a view to an action, by rule and a seeded rng.

| name | plays |
|---|---|
| caller | checks and calls, always: a calling station |
| random | each allowed action alike: fold, call, the smallest raise, all-in |
| tight | folds weak hands, calls with fair ones, raises with strong ones |
| aggressive | raises the pot with fair hands and every fourth time with nothing |
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from echo2_workers.environments.holdem_table import RANKS, Action, View

Opponent = Callable[[View, random.Random], Action]
FAIR: Final = 0.45
STRONG: Final = 0.7


def caller(view: View, rng: random.Random) -> Action:
    return Action("call")


def random_player(view: View, rng: random.Random) -> Action:
    actions = [Action("call")]
    if view.to_call:
        actions.append(Action("fold"))
    if view.raise_max:
        actions += [Action("raise", view.raise_min), Action("all-in")]
    return rng.choice(actions)


def tight(view: View, rng: random.Random) -> Action:
    strength = hand_strength(view)
    if strength >= STRONG:
        return pot_raise(view)
    if strength >= FAIR and view.to_call <= max(view.pot // 2, 2):
        return Action("call")
    return Action("fold")


def aggressive(view: View, rng: random.Random) -> Action:
    strength = hand_strength(view)
    if strength >= FAIR or rng.random() < 0.25:
        return pot_raise(view)
    return Action("call" if view.to_call <= 2 else "fold")


OPPONENTS: Final[Mapping[str, Opponent]] = {
    "caller": caller,
    "random": random_player,
    "tight": tight,
    "aggressive": aggressive,
}


def pot_raise(view: View) -> Action:
    """A raise by the pot within what is allowed, or a call."""
    if not view.raise_max:
        return Action("call")
    amount = view.pot + 2 * view.to_call
    return Action("raise", min(max(amount, view.raise_min), view.raise_max))


def hand_strength(view: View) -> float:
    """A rule of thumb from 0 to 1: high cards and pairs before the flop; what the hole cards
    made of the board after it."""
    ranks = [RANKS.index(card) for card in view.hole[::2]]
    high = sum(ranks) / (2 * (len(RANKS) - 1))
    paired = ranks[0] == ranks[1]
    if not view.board:
        suited = view.hole[1] == view.hole[3]
        return min(1.0, 0.55 + 0.45 * high) if paired else 0.75 * high + 0.06 * suited
    board = [RANKS.index(card) for card in view.board[::2]]
    together = Counter([*ranks, *board])
    of_ours = sorted((together[rank] for rank in set(ranks)), reverse=True)
    suits = Counter([*view.hole[1::2], *view.board[1::2]])
    if of_ours[0] >= 3 or (of_ours[0] == 2 and of_ours[-1] == 2 and len(of_ours) == 2):
        return 0.95
    if any(suits[suit] >= 5 for suit in set(view.hole[1::2])):
        return 0.95
    if of_ours[0] == 2:
        pair = max(rank for rank in set(ranks) if together[rank] == 2)
        return 0.75 if pair >= max(board) else 0.5
    return 0.3 * high
