"""Trajectories in rows of tokens, none of which sees another's: pure, on numpy arrays.

Promise: the logprob of a token in a packed row is that of its trajectory alone, and the sum of
all micro-batches' gradients is that of one whole batch, on however many ranks.

Trajectories of a group begin with the same prompt, often with the same system prompt as those
of other groups. A **bundle** holds each common beginning once, as a tree of tokens: a token
sees itself and its ancestors (`attention_RLL`), and stands at the position that it has in its
trajectory. Bundles are put side by side in rows of like length. What a tree saves in tokens it
may cost in attention, which every token of a row pays for every other: `bundles_of` weighs the
two with `pair_cost` and starts a new bundle when sharing does not pay.

Life-cycle: trajectories -> `bundles_of` -> `plan` (who computes which, when) -> `rows_of`.
With packing off there is one trajectory in a row (`padded_rows`). For attention kernels that
take sequences of varying length, one long row has positions that start again (`flat_rows`).

Letters: N tokens in the loss, U positions whose logits give them, R rows, L tokens of a row.
"""

# ruff: noqa: N815  shape letters in field names
from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ROW_COST_MAX = 0.05
"""Bundles are put into one row as long as attention costs less than this share more."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A tree of `num_nodes` tokens. Member i is sequence `members[i]`; its tokens from
    `fresh[i]` on are new nodes, those before belong to members before it. `paths[i]` [T]
    holds the node of each of its tokens."""

    members: tuple[int, ...]
    fresh: tuple[int, ...]
    paths: tuple[Ints, ...]
    num_nodes: int


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows for one forward pass.

    `attention_RLL` True where a row's token sees a column's; None when causality alone says
    so (one trajectory a row, or `position_ids_RL` that start again, in a single row).
    `context_U` flat indexes into [R * L], ascending, of tokens whose successors are in the
    loss; `context_N` index into U, ascending, `target_N` the successor, `place_N` flat index
    into [B * T] of the loss, B the trajectories in the order given, T the longest.
    """

    token_ids_RL: Ints
    position_ids_RL: Ints
    attention_RLL: Bools | None
    context_U: Ints
    context_N: Ints
    target_N: Ints
    place_N: Ints


def plan(
    sizes: Sequence[int], *, tokens_max: int, num_ranks: int = 1, padded: bool = False
) -> list[list[list[int]]]:
    """[rank][micro-batch] -> indexes of items, each item once; a rank has as many micro-batches
    as any other, some of them empty if need be.

    A micro-batch holds at most `tokens_max` tokens (with `padded`, each of its items counted
    with the longest), or one single item. The micro-batches that the ranks compute at the same
    time are of like size. Depends on the arguments alone: every rank finds the same plan.
    """
    bins = _padded_bins(sizes, tokens_max) if padded else _even_bins(sizes, tokens_max, num_ranks)
    rounds = math.ceil(len(bins) / num_ranks)
    bins += [[] for _ in range(rounds * num_ranks - len(bins))]
    return [[bins[i * num_ranks + rank] for i in range(rounds)] for rank in range(num_ranks)]


def _even_bins(sizes: Sequence[int], tokens_max: int, num_ranks: int) -> list[list[int]]:
    """As few as fit, a multiple of `num_ranks`, and as even as the largest-first rule gets."""
    rounds = math.ceil(sum(sizes) / tokens_max / num_ranks)
    while True:
        bins = spread_evenly(sizes, rounds * num_ranks)
        if all(len(some) <= 1 or sum(sizes[i] for i in some) <= tokens_max for some in bins):
            return sorted(
                (sorted(some) for some in bins if some),
                key=lambda some: (-sum(sizes[i] for i in some), some),
            )
        rounds += 1


def _padded_bins(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    runs = padded_runs([lengths[i] for i in order], tokens_max=tokens_max)
    return [order[run.start : run.stop] for run in runs]


def padded_runs(lengths: Sequence[int], *, tokens_max: int) -> Iterator[range]:
    """Cut ascending lengths into runs whose rows, padded to the longest, fit `tokens_max`."""
    start = 0
    for index, length in enumerate(lengths):
        if index > start and (index + 1 - start) * length > tokens_max:
            yield range(start, index)
            start = index
    if start < len(lengths):
        yield range(start, len(lengths))


def spread_evenly(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Largest first, each into the bin that is least full (Graham's rule)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, index) for index in range(num_bins)]
    for item in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, index = loads[0]
        heapq.heapreplace(loads, (load + sizes[item], index))
        bins[index].append(item)
    return bins


def bundles_of(
    sequences: Sequence[npt.NDArray[np.int32]], *, pair_cost: float, nodes_max: int
) -> list[Bundle]:
    """Every sequence in one bundle; those with a common beginning together where it pays.

    Costs are in tokens: a node costs 1, and `pair_cost` more for each node of its bundle.
    """
    made = []
    members: list[int] = []
    fresh: list[int] = []
    paths: list[Ints] = []
    nodes = 0
    # Neighbours in this order have the longest beginnings in common.
    for index in sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes()):
        sequence = sequences[index]
        shared = _common(sequences[members[-1]], sequence) if members else 0
        new, length = len(sequence) - shared, len(sequence)
        together = new + pair_cost * ((nodes + new) ** 2 - nodes**2)
        alone = length + pair_cost * length**2
        if members and (together > alone or nodes + new > nodes_max):
            made.append(Bundle(tuple(members), tuple(fresh), tuple(paths), nodes))
            members, fresh, paths, nodes = [], [], [], 0
            shared, new = 0, length
        path = np.empty(length, dtype=np.int64)
        path[:shared] = paths[-1][:shared] if shared else 0
        path[shared:] = np.arange(nodes, nodes + new)
        members.append(index)
        fresh.append(shared)
        paths.append(path)
        nodes += new
    if members:
        made.append(Bundle(tuple(members), tuple(fresh), tuple(paths), nodes))
    return made


def single_bundles(sequences: Sequence[npt.NDArray[np.int32]]) -> list[Bundle]:
    """Each sequence on its own."""
    return [
        Bundle((i,), (0,), (np.arange(len(sequence)),), len(sequence))
        for i, sequence in enumerate(sequences)
    ]


def _common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Number of leading tokens that are the same."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter


def rows_of(
    bundles: Sequence[Bundle],
    sequences: Sequence[npt.NDArray[np.int32]],
    loss_masks: Sequence[Bools],
    *,
    pair_cost: float,
) -> PackedRows:
    """`bundles` in rows of like length. The trajectories of the loss are their members, in
    ascending order of index."""
    sizes = [bundle.num_nodes for bundle in bundles]
    row_tokens = max(max(sizes), row_length(pair_cost))
    rows = spread_evenly(sizes, max(1, math.ceil(sum(sizes) / row_tokens)))
    return _laid_out([[bundles[i] for i in row] for row in rows if row], sequences, loss_masks)


def row_length(pair_cost: float) -> int:
    """Tokens of a row for which attention costs ROW_COST_MAX more."""
    return max(1, int(ROW_COST_MAX / pair_cost))


def padded_rows(
    bundles: Sequence[Bundle],
    sequences: Sequence[npt.NDArray[np.int32]],
    loss_masks: Sequence[Bools],
) -> PackedRows:
    """One bundle in a row."""
    return _laid_out([[bundle] for bundle in bundles], sequences, loss_masks)


def flat_rows(
    bundles: Sequence[Bundle],
    sequences: Sequence[npt.NDArray[np.int32]],
    loss_masks: Sequence[Bools],
) -> PackedRows:
    """Single sequences end to end in one row, without a mask: where positions start again, a
    sequence begins, as attention kernels for varying lengths and transformers have it."""
    return _laid_out([list(bundles)], sequences, loss_masks, masked=False)


def _laid_out(
    rows: Sequence[Sequence[Bundle]],
    sequences: Sequence[npt.NDArray[np.int32]],
    loss_masks: Sequence[Bools],
    *,
    masked: bool = True,
) -> PackedRows:
    length = max(sum(bundle.num_nodes for bundle in row) for row in rows)
    token_ids = np.zeros((len(rows), length), dtype=np.int64)
    position_ids = np.zeros((len(rows), length), dtype=np.int64)
    is_plain = all(len(row) == 1 and len(row[0].members) == 1 for row in rows)
    attention = None
    if masked and not is_plain:
        attention = np.zeros((len(rows), length, length), dtype=np.bool_)
        # What only fills a row up sees itself: a token that sees nothing has no average.
        attention[:, np.arange(length), np.arange(length)] = True
    members = sorted(index for row in rows for bundle in row for index in bundle.members)
    place_of = {index: place for place, index in enumerate(members)}
    longest = max(len(sequences[index]) for index in members)
    contexts, targets, places = [], [], []
    for row_index, row in enumerate(rows):
        start = 0
        for bundle in row:
            for index, fresh, path in zip(bundle.members, bundle.fresh, bundle.paths, strict=True):
                sequence = sequences[index]
                new = path[fresh:]
                if len(new):
                    low, high = start + int(new[0]), start + int(new[-1]) + 1
                    token_ids[row_index, low:high] = sequence[fresh:]
                    position_ids[row_index, low:high] = np.arange(fresh, len(sequence))
                    if attention is not None:
                        if fresh:  # what the token before them sees, and that token
                            attention[row_index, low:high] = attention[
                                row_index, start + int(path[fresh - 1])
                            ]
                        attention[row_index, low:high, low:high] = _triangle(high - low)
                trained = np.flatnonzero(loss_masks[index])
                contexts.append(row_index * length + start + path[trained - 1])
                targets.append(sequence[trained])
                places.append(place_of[index] * longest + trained)
            start += bundle.num_nodes
    context_U, context_N = np.unique(np.concatenate(contexts), return_inverse=True)
    order = np.argsort(context_N, kind="stable")
    return PackedRows(
        token_ids_RL=token_ids,
        position_ids_RL=position_ids,
        attention_RLL=attention,
        context_U=context_U.astype(np.int64),
        context_N=context_N[order].astype(np.int64),
        target_N=np.concatenate(targets)[order].astype(np.int64),
        place_N=np.concatenate(places)[order].astype(np.int64),
    )


def _triangle(length: int) -> Bools:
    """[length, length] True on the diagonal and below."""
    return np.tri(length, dtype=np.bool_)
