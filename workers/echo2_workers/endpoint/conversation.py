"""The calls of one rollout, as trajectories: every token as the policy saw or sampled it.

Promise: nothing that the policy sampled is ever tokenized again. The tokens of a call are
those of the call that it continues, with that one's answer as sampled, and after them only
the tokens of what is new.

Calls form a tree. A call continues the call whose whole conversation (its messages and the
answer) is the longest beginning of its own messages; of equal ones the newest. A call that
continues none (the first one, another conversation, or a rewritten history) is a new root.
A call that continues one which was continued before opens a new branch. A trajectory is the
path from a root to a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from echo2.types import Span
from echo2_workers.environment import Completion, RolloutBuilder

Conversation = tuple[Any, ...] | str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One turn of the policy. `conversation` is what a later call must begin with: the matter
    of each message of a chat, the characters of a text, or token ids. `new_ids` are the
    tokens between the parent's answer (or the start) and this one's."""

    index: int
    key: tuple[Any, ...]
    conversation: Conversation
    parent: Call | None
    new_ids: tuple[int, ...]
    completion: Completion

    def path(self) -> list[Call]:
        """From the root to this call."""
        path: list[Call] = []
        call: Call | None = self
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    def ids(self) -> list[int]:
        """All tokens up to the end of the answer."""
        return [i for call in self.path() for i in (*call.new_ids, *call.completion.token_ids)]


@dataclass(frozen=True, slots=True)
class Branch:
    """A trajectory that can be trained: the calls from its root to its leaf."""

    calls: tuple[Call, ...]

    @property
    def num_sampled(self) -> int:
        return sum(len(call.completion.token_ids) for call in self.calls)

    @property
    def num_tokens(self) -> int:
        return self.num_sampled + sum(len(call.new_ids) for call in self.calls)

    def builder(self) -> RolloutBuilder:
        """The same as if an environment had played these turns itself."""
        builder = RolloutBuilder(self.calls[0].new_ids)
        for index, call in enumerate(self.calls):
            if index:
                builder.add_observation(call.new_ids)
            builder.add_completion(call.completion)
        return builder


class Calls:
    """All calls of one rollout, in the order in which they were answered."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def continued(
        self, key: tuple[Any, ...], matched: Callable[[Conversation], bool]
    ) -> Call | None:
        """The call that is continued: of those whose conversation is `matched` the longest.
        Tools and template arguments (`key`) must be the same: they are part of the prompt."""
        best: Call | None = None
        for call in self._calls:
            if call.key == key and matched(call.conversation):
                longer = best is None or len(call.conversation) >= len(best.conversation)
                best = call if longer else best
        return best

    def add(self, call: Call) -> None:
        self._calls.append(call)

    def branches(self) -> tuple[Branch, ...]:
        """One for each leaf, in the order of their last calls."""
        parents = {id(call.parent) for call in self._calls if call.parent is not None}
        return tuple(Branch(tuple(c.path())) for c in self._calls if id(c) not in parents)

    @property
    def num_roots(self) -> int:
        return sum(call.parent is None for call in self._calls)


def cut(completion: Completion, length: int) -> Completion:
    """The first `length` tokens, as a turn that ended there by itself."""
    spans = tuple(
        Span(span.version, span.start, min(span.end, length))
        for span in completion.spans
        if span.start < length
    )
    return Completion(
        completion.token_ids[:length], completion.logprobs[:length], spans, finish="stop"
    )
