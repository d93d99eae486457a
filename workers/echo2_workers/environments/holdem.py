"""`holdem`: heads-up no-limit hold'em against a scripted opponent, several turns a rollout.

Each decision is a turn: the table is shown, the policy says one action, and only what it said
is in the loss (papers, Appendix D, masks by turn). A task is a deal: every trajectory of a
group gets the same cards, and so does the opponent's chance. Deal 2k and 2k + 1 have the same
cards with the seats changed. Deals of the eval split are held out by a hash of the cards.

    shown:    AsKd 7h8c2d B 6 2 38>      own cards, board or -, seat (B button, O other), pot,
                                         chips to call, own stack; in chips: small blind 1, big 2
    said:     f | c | r12 | a            fold, check or call, raise to 12, all-in

    reward = reward_scale * (chips won in big blinds - illegal_penalty * illegal actions) / hands

so with the defaults the mean reward of an eval is big blinds won per hand. What is no action,
or not allowed, becomes a check where that is free and a fold where it is not. After
`decisions_max` decisions in a hand the policy checks or calls without being asked. The opponent
does not fold before the policy's first decision (it calls), so that there is one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from echo2.types import Task
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.environments.answers import AnswerRule
from echo2_workers.environments.chat import Chat
from echo2_workers.environments.draws import check_eval_share, held_out_draw
from echo2_workers.environments.extras import versioned
from echo2_workers.environments.holdem_opponents import OPPONENTS
from echo2_workers.environments.holdem_table import (
    BIG_BLIND,
    Action,
    Table,
    View,
    parse_action,
    shuffled_deck,
)

SYSTEM: Final = """\
You play heads-up no-limit Texas hold'em. Each message shows the table as
CARDS BOARD SEAT POT TO_CALL STACK>
for example "AsKd 7h8c2d B 6 2 38>": your cards, the board (- before the flop), your seat (B for
the button, O for the other), the chips in the pot, the chips to call, your stack. The blinds are
1 and 2. Answer with one action and nothing else: f (fold), c (check or call), rN (raise to N
chips), a (all-in)."""


class Holdem:
    """`system` None: the rules above where the model has a chat template, else nothing."""

    name = "holdem"
    version = versioned("1", "pokerkit", extra="envs", environment="holdem")
    replays = True

    def __init__(
        self,
        *,
        assets: Path | None,
        opponent: str = "caller",
        hands: int = 1,
        stack_bb: int = 20,
        decisions_max: int = 8,
        illegal_penalty: float = 0.5,
        reward_scale: float = 1.0,
        seed: int = 0,
        eval_share: float = 0.2,
        answer: str = "whole",
        system: str | None = None,
        chat: bool | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_eval_share(eval_share)
        if opponent not in OPPONENTS:
            raise ValueError(f"opponent is {opponent!r}; allowed are {', '.join(OPPONENTS)}")
        for name, value, least, most in (
            ("hands", hands, 1, 32),
            ("stack_bb", stack_bb, 2, 1000),
            ("decisions_max", decisions_max, 1, 64),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name} is {value}; it must be from {least} to {most}")
        if hands * decisions_max > 256:
            raise ValueError(
                f"hands * decisions_max is {hands * decisions_max}; a trajectory has at most 256 "
                "turns"
            )
        if not 0.0 <= illegal_penalty <= 1000.0 or not 0.0 < reward_scale <= 1000.0:
            raise ValueError(
                f"illegal_penalty is {illegal_penalty} and reward_scale {reward_scale}; they must "
                "be from 0, and above 0, to 1000"
            )
        self._opponent = OPPONENTS[opponent]
        self._hands = hands
        self._stack = stack_bb * BIG_BLIND
        self._decisions_max = decisions_max
        self._illegal_penalty = illegal_penalty
        self._reward_scale = reward_scale
        self._seed = seed
        self._eval_share = eval_share
        self._answer = AnswerRule(answer)
        self._chat = Chat(assets, chat=chat, system=system, options=chat_options, rules=SYSTEM)

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> str:
        deal, seat = divmod(index, 2)
        _, decks = held_out_draw(
            split,
            deal,
            seed=self._seed,
            eval_share=self._eval_share,
            make=self._decks,
            content=" ".join,
        )
        return json.dumps({"decks": decks, "seat": seat, "deal": deal})

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        content = json.loads(task.payload)
        seat = int(content["seat"])
        rollout: RolloutBuilder | None = None
        completion = None
        chips = illegal = 0
        for hand, deck in enumerate(content["decks"]):
            table = Table(deck, stack=self._stack)
            decisions = moves = 0
            while (actor := table.actor) is not None:
                view = table.view()
                moves += 1
                if actor != seat:
                    chance = random.Random(f"{self._seed}:{content['deal']}:{hand}:{moves}")
                    action = self._opponent(view, chance)
                    if rollout is None and action.kind == "fold":
                        action = Action("call")
                    table.act(action)
                    continue
                decisions += 1
                if decisions > self._decisions_max:
                    table.act(Action("call"))
                    continue
                shown = show(view)
                if rollout is None or completion is None:
                    rollout = RolloutBuilder(self._chat.opening(shown))
                else:
                    rollout.add_observation(self._chat.observation(shown, completion))
                completion = await generate(rollout.token_ids)
                rollout.add_completion(completion)
                said = self._answer.find(self._chat.decode(completion.token_ids))
                illegal += not table.act(parse_action(said))
            chips += table.payoff(seat)
        assert rollout is not None, "the opponent ends no hand before the policy has acted"
        won = chips / BIG_BLIND - self._illegal_penalty * illegal
        return rollout.finish(
            self._reward_scale * won / len(content["decks"]),
            info={"chips_bb": chips / BIG_BLIND, "illegal": illegal},
        )

    def _decks(self, number: int) -> list[str]:
        rng = random.Random(f"{self._seed}:{number}")
        return [shuffled_deck(rng) for _ in range(self._hands)]


def show(view: View) -> str:
    """The table in characters, as the module's text says."""
    seat = "B" if view.seat == 1 else "O"
    return f"{view.hole} {view.board or '-'} {seat} {view.pot} {view.to_call} {view.stack}>"
