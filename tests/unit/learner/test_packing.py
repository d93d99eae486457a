"""Who computes what, and rows in which no token sees another trajectory's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2_learner.packing import (
    Bundle,
    PackedRows,
    bundles_of,
    flat_rows,
    padded_rows,
    padded_runs,
    plan,
    rows_of,
    single_bundles,
)

Sequences = list[np.ndarray[tuple[int], np.dtype[np.int32]]]


@st.composite
def families(draw: st.DrawFn) -> Sequences:
    """Sequences of a small alphabet that often begin alike, some of them equal."""
    trunk = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    found = []
    for _ in range(draw(st.integers(1, 7))):
        kept = draw(st.integers(0, len(trunk)))
        own = draw(st.lists(st.integers(0, 3), min_size=0 if kept else 1, max_size=6))
        found.append(np.array([*trunk[:kept], *own], dtype=np.int32))
    return found


@given(
    sizes=st.lists(st.integers(1, 50), max_size=40),
    tokens_max=st.integers(1, 100),
    num_ranks=st.integers(1, 5),
    padded=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_plan_holds_each_item_once_in_as_many_micro_batches_for_each_rank(
    sizes: list[int], tokens_max: int, num_ranks: int, padded: bool
) -> None:
    planned = plan(sizes, tokens_max=tokens_max, num_ranks=num_ranks, padded=padded)
    assert len(planned) == num_ranks
    assert len({len(rank) for rank in planned}) == 1
    every = [item for rank in planned for micro in rank for item in micro]
    assert sorted(every) == list(range(len(sizes)))
    for micro in (micro for rank in planned for micro in rank if len(micro) > 1):
        counted = [max(sizes[i] for i in micro) if padded else sizes[j] for j in micro]
        assert sum(counted) <= tokens_max
    if planned[0]:  # no round is empty on all ranks
        assert any(rank[-1] for rank in planned)


def test_micro_batches_of_one_round_are_of_like_size() -> None:
    sizes = [9, 1, 8, 2, 7, 3, 6, 4, 5, 5]
    (first,), (second,) = plan(sizes, tokens_max=25, num_ranks=2)
    assert sum(sizes[i] for i in first) == sum(sizes[i] for i in second) == 25
    assert plan([], tokens_max=5, num_ranks=3) == [[], [], []]
    assert plan([9], tokens_max=5, num_ranks=2) == [[[0]], [[]]]


def test_runs_of_rows_fill_their_budget() -> None:
    assert list(padded_runs([2, 2, 3, 3, 8], tokens_max=9)) == [range(3), range(3, 4), range(4, 5)]
    assert list(padded_runs([], tokens_max=9)) == []


def seen_by(packed: PackedRows, row: int, column: int) -> list[tuple[int, int]]:
    """(position, token) of all that a token sees, in order of position."""
    if packed.attention_RLL is None:
        seen = np.arange(column + 1)
    else:
        seen = np.flatnonzero(packed.attention_RLL[row, column])
    order = np.argsort(packed.position_ids_RL[row, seen], kind="stable")
    return [
        (int(packed.position_ids_RL[row, i]), int(packed.token_ids_RL[row, i])) for i in seen[order]
    ]


@given(
    sequences=families(),
    pair_cost=st.sampled_from([1e-6, 1e-3, 0.02, 0.3]),
    nodes_max=st.integers(1, 60),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_every_token_in_the_loss_sees_just_the_beginning_of_its_own_trajectory(
    sequences: Sequences, pair_cost: float, nodes_max: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    masks = [(rng.random(len(s)) < 0.7) & (np.arange(len(s)) > 0) for s in sequences]
    bundles = bundles_of(sequences, pair_cost=pair_cost, nodes_max=nodes_max)
    assert sorted(i for bundle in bundles for i in bundle.members) == list(range(len(sequences)))
    for bundle in bundles:
        assert bundle.num_nodes <= nodes_max or len(bundle.members) == 1
        assert bundle.num_nodes <= sum(len(sequences[i]) for i in bundle.members)
    packed = rows_of(bundles, sequences, masks, pair_cost=pair_cost)
    length = packed.token_ids_RL.shape[1]
    longest = max(len(s) for s in sequences)
    assert sorted(packed.place_N.tolist()) == [
        i * longest + t for i, mask in enumerate(masks) for t in np.flatnonzero(mask)
    ]
    assert packed.context_U.tolist() == sorted(set(packed.context_U.tolist()))
    assert (np.diff(packed.context_N) >= 0).all()
    for context, target, place in zip(
        packed.context_U[packed.context_N], packed.target_N, packed.place_N, strict=True
    ):
        sequence, token = sequences[place // longest], place % longest
        assert target == sequence[token]
        assert seen_by(packed, *divmod(int(context), length)) == list(enumerate(sequence[:token]))


def test_a_prompt_is_computed_once_for_its_group_where_that_pays() -> None:
    prompt = list(range(10))
    sequences = [np.array([*prompt, 50 + i, 7], dtype=np.int32) for i in range(8)]
    (bundle,) = bundles_of(sequences, pair_cost=1e-3, nodes_max=1000)
    assert bundle.num_nodes == 10 + 8 * 2
    strangers = [(sequence + 100 * i).astype(np.int32) for i, sequence in enumerate(sequences, 1)]
    alone = bundles_of(strangers, pair_cost=0.1, nodes_max=1000)
    assert [each.num_nodes for each in alone] == [12] * 8
    twins = bundles_of([sequences[0], sequences[0].copy()], pair_cost=1e-3, nodes_max=1000)
    assert [(each.members, each.num_nodes) for each in twins] == [((0, 1), 12)]


def test_single_trajectories_need_no_mask_and_one_long_row_starts_positions_again() -> None:
    sequences = [np.array([1, 2, 3], dtype=np.int32), np.array([4, 5], dtype=np.int32)]
    masks = [np.array([False, True, True]), np.array([False, True])]
    bundles: list[Bundle] = single_bundles(sequences)
    apart = padded_rows(bundles, sequences, masks)
    assert apart.attention_RLL is None
    assert apart.token_ids_RL.tolist() == [[1, 2, 3], [4, 5, 0]]
    flat = flat_rows(bundles, sequences, masks)
    assert flat.attention_RLL is None
    assert flat.token_ids_RL.tolist() == [[1, 2, 3, 4, 5]]
    assert flat.position_ids_RL.tolist() == [[0, 1, 2, 0, 1]]
    assert flat.place_N.tolist() == apart.place_N.tolist() == [1, 2, 4]


@pytest.mark.parametrize("tokens_max", [1, 12, 20, 1000])
def test_padded_micro_batches_keep_within_their_tokens(tokens_max: int) -> None:
    lengths = [5, 9, 7, 6, 12, 5]
    (planned,) = plan(lengths, tokens_max=tokens_max, padded=True)
    for micro in planned:
        assert len(micro) * max(lengths[i] for i in micro) <= tokens_max or len(micro) == 1
