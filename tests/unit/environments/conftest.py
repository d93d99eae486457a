"""A policy for tests: it says texts, and records what it was shown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from echo2.types import Sampling, Span, Task, Version
from echo2_workers.environment import Completion, Environment, Rollout, check_rollout
from echo2_workers.environments.chat import Chat
from echo2_workers.models import model_folder

EOS = 2
Says = str | Iterable[str] | Callable[[str], str]


class Policy:
    """`shown` holds the text before each turn of the last rollout."""

    def __init__(self, assets: Path) -> None:
        self.assets = assets
        self.chat = Chat(assets)
        self.shown: list[str] = []

    def play(self, environment: Environment, payload: str, says: Says) -> Rollout:
        """A checked rollout. One text is said at every turn; of many each once."""
        return asyncio.run(self.play_async(environment, payload, says))

    async def play_async(self, environment: Environment, payload: str, says: Says) -> Rollout:
        self.shown = []
        texts = iter(says) if not isinstance(says, str) and not callable(says) else None

        def say(text: str) -> str:
            if texts is not None:
                return next(texts)
            return says(text) if callable(says) else str(says)

        async def generate(
            token_ids: Sequence[int], sampling: Sampling | None = None
        ) -> Completion:
            text = self.chat.decode(token_ids)
            self.shown.append(text)
            return a_completion([*self.chat.encode(say(text)), EOS])

        return check_rollout(await environment.rollout(Task(0, payload), generate))

    def said(self, rollout: Rollout) -> list[str]:
        """What of a rollout is in the loss, turn by turn."""
        ids, mask = rollout.token_ids, rollout.loss_mask
        edges = np.flatnonzero(np.diff([0, *mask.astype(int), 0]))
        return [
            self.chat.decode(ids[start:end].tolist())
            for start, end in zip(edges[::2], edges[1::2], strict=True)
        ]


def a_completion(token_ids: Sequence[int]) -> Completion:
    length = len(token_ids)
    spans = (Span(Version(1, 1), 0, length),)
    return Completion(tuple(token_ids), np.full(length, -0.5, np.float32), spans, "stop")


@pytest.fixture
def assets() -> Path:
    """The shipped model over ASCII: its tokenizer has all that is needed here."""
    return model_folder("builtin:ascii-1m")


@pytest.fixture
def policy(assets: Path) -> Policy:
    return Policy(assets)
