"""One hand of heads-up no-limit hold'em, by the rules of pokerkit.

Promise: `act` takes any action and the hand goes on by rule: what is not allowed becomes a
check where that is free and a fold where it is not, and `act` says so. Chips are conserved:
the two payoffs sum to 0. All cards come from `deck`, so that a deal can be played again.

Seat 0 posts the big blind, seat 1 is the button, posts the small blind and acts first before
the flop. Chips are half big blinds: small blind 1, big blind 2.
"""

from __future__ import annotations

import functools
import random
import re
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, Literal

from echo2_workers.environments.extras import require

SMALL_BLIND: Final = 1
BIG_BLIND: Final = 2
DECK_CARDS: Final = 9
"""Two hands and the board."""
RANKS: Final = "23456789TJQKA"
SUITS: Final = "cdhs"
Kind = Literal["fold", "call", "raise", "all-in"]
_ACTION: Final = re.compile(r"(?:f|c|a|r[0-9]{1,6})")
_NAMES: Final[dict[str, Kind]] = {"f": "fold", "c": "call", "a": "all-in", "r": "raise"}


@dataclass(frozen=True, slots=True)
class Action:
    """`amount`: with "raise", the chips that this seat's bet of this round is raised to."""

    kind: Kind
    amount: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What a seat knows when it is to act. Cards as "AsKd"; all else in chips. A raise goes to
    `raise_min` .. `raise_max`, both 0 when none is allowed."""

    hole: str
    board: str
    seat: int
    pot: int
    to_call: int
    stack: int
    raise_min: int
    raise_max: int


def parse_action(text: str | None) -> Action | None:
    """ "f" fold, "c" check or call, "r12" raise to 12 chips, "a" all-in; None for all else."""
    said = (text or "").strip().lower()
    if not _ACTION.fullmatch(said):
        return None
    return Action(_NAMES[said[0]], int(said[1:] or 0))


def shuffled_deck(rng: random.Random) -> str:
    """The cards of one deal: seat 0's, seat 1's, the board's."""
    cards = [rank + suit for rank in RANKS for suit in SUITS]
    return "".join(rng.sample(cards, DECK_CARDS))


class Table:
    """`stack`: chips of each seat before the blinds."""

    def __init__(self, deck: str, *, stack: int) -> None:
        pokerkit = require("pokerkit", extra="envs", environment="holdem")
        if not re.fullmatch(rf"(?:[{RANKS}][{SUITS}]){{{DECK_CARDS}}}", deck):
            raise ValueError(f"deck is {deck!r}; it must be {DECK_CARDS} cards such as AsKd...")
        self._deck = [deck[i : i + 2] for i in range(0, 2 * DECK_CARDS, 2)]
        self._stack = stack
        self._hands = ("".join(self._deck[:2]), "".join(self._deck[2:4]))
        self._board = "".join(self._deck[4:])
        rest = [rank + suit for rank in RANKS for suit in SUITS if rank + suit not in self._deck]
        self._state = pokerkit.NoLimitTexasHoldem.create_state(
            _automations(pokerkit), True, 0, (SMALL_BLIND, BIG_BLIND), BIG_BLIND, (stack, stack), 2
        )
        state = self._state
        # pokerkit deals and burns from the top: hole cards, and a burnt card before each street.
        order = [
            *(self._deck[0], self._deck[2], self._deck[1], self._deck[3]),
            *(rest[0], *self._deck[4:7], rest[1], self._deck[7], rest[2], self._deck[8]),
        ]
        state.deck_cards = deque(pokerkit.Card.parse("".join([*order, *rest[3:]])))
        for _ in range(4):
            state.deal_hole()

    @property
    def actor(self) -> int | None:
        """The seat that is to act; None when the hand is over."""
        actor: int | None = self._state.actor_index
        return actor

    def view(self) -> View:
        """What the actor sees."""
        state = self._state
        seat = state.actor_index
        can_raise = state.can_complete_bet_or_raise_to()
        board = "".join(repr(cards[0]) for cards in state.board_cards)
        return View(
            hole=self._hands[seat],
            board=board,
            seat=seat,
            pot=int(state.total_pot_amount),
            to_call=int(state.checking_or_calling_amount),
            stack=int(state.stacks[seat]),
            raise_min=int(state.min_completion_betting_or_raising_to_amount) if can_raise else 0,
            raise_max=int(state.max_completion_betting_or_raising_to_amount) if can_raise else 0,
        )

    def act(self, action: Action | None) -> bool:
        """Carry out the actor's action; False when it was not allowed (or None) and became a
        check or a fold. Going all-in without a raise being allowed is a call; a fold where a
        check is free is a check."""
        state, view = self._state, self.view()
        kind, amount = (action.kind, action.amount) if action is not None else ("none", 0)
        if kind == "all-in" and view.raise_max:
            kind, amount = "raise", view.raise_max
        if kind in ("call", "all-in"):
            state.check_or_call()
            return True
        if kind == "raise" and view.raise_max and view.raise_min <= amount <= view.raise_max:
            state.complete_bet_or_raise_to(amount)
            return True
        if view.to_call:
            state.fold()
        else:
            state.check_or_call()
        return kind == "fold"

    def payoff(self, seat: int) -> int:
        """Chips won or lost by `seat`; of meaning when the hand is over."""
        state = self._state
        if not state.status:  # somebody folded, and the chips were pushed
            return int(state.stacks[seat]) - self._stack
        # A showdown. Both have put in the same, since both began with the same.
        staked = self._stack - int(state.stacks[seat])
        return staked * _winner(*self._hands, self._board) * (1 if seat == 0 else -1)


@functools.lru_cache(maxsize=256)
def _winner(first: str, second: str, board: str) -> int:
    """1, -1 or 0 (split) for the first hand. Kept, since a group plays the same cards G times
    and pokerkit takes milliseconds; at a table it would evaluate each hand many times more."""
    pokerkit = require("pokerkit", extra="envs", environment="holdem")
    ours, theirs = (pokerkit.StandardHighHand.from_game(hole, board) for hole in (first, second))
    return int(ours > theirs) - int(ours < theirs)


def _automations(pokerkit: Any) -> tuple[Any, ...]:
    """All but the dealing of hole cards, which has to wait for our deck, and the showdown,
    which `payoff` settles."""
    automation = pokerkit.Automation
    own = (automation.HOLE_DEALING, automation.HOLE_CARDS_SHOWING_OR_MUCKING)
    return tuple(each for each in automation if each not in own)
