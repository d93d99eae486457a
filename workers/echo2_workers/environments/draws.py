"""Tasks of endless generators, held out by content: the first draw that belongs to the split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from echo2_workers.environment import Split
from echo2_workers.environments.splits import split_of

DRAWS_MAX: Final = 200
T = TypeVar("T")


def check_eval_share(eval_share: float) -> None:
    if not 0.0 < eval_share < 1.0:
        raise ValueError(f"eval_share is {eval_share}; it must be above 0 and below 1")


def draw_number(split: Split, index: int, draw: int) -> int:
    """Number of a draw; no two of (split, index, draw) share one."""
    return (index * DRAWS_MAX + draw) * 2 + (split == "eval")


def held_out_draw(
    split: Split,
    index: int,
    *,
    seed: int,
    eval_share: float,
    make: Callable[[int], T],
    content: Callable[[T], str],
) -> tuple[int, T]:
    """(number, made) of the first draw whose content is of `split`. Raises ValueError when
    there is none: the generator then has too few different tasks for such a share."""
    for draw in range(DRAWS_MAX):
        number = draw_number(split, index, draw)
        made = make(number)
        if split_of(content(made), seed=seed, eval_share=eval_share) == split:
            return number, made
    raise ValueError(
        f"none of {DRAWS_MAX} draws is of split {split!r}: the settings give too few different "
        f"tasks; enlarge them, or change eval_share (now {eval_share})"
    )
