"""Endless tasks in several turns: the environment is the policy's user and says "+" or "-"."""

import itertools
import random
from collections.abc import Iterator

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    secret: int


class Guess(vf.Task[GuessData]):
    @vf.reward
    async def found(self, task: GuessData, trace: vf.Trace) -> float:
        right = trace.last_reply.strip() == str(task.secret)
        return 1.0 - 0.25 * (trace.num_turns - 1) if right else 0.0


class Guesses(vf.Taskset[Guess]):
    INFINITE = True

    def load(self) -> Iterator[Guess]:
        for number in itertools.count():
            secret = random.Random(number).randrange(10**6)
            yield Guess(GuessData(prompt=f"below {secret + 50}?", secret=secret))


class GuessEnv(vf.SingleAgentEnv):
    async def run(self, task: Guess, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply.strip() != str(task.data.secret):
                low = int(segment.last_reply) < task.data.secret
                segment = await interaction.turn("+" if low else "-")


__all__ = ["GuessEnv", "Guesses"]
