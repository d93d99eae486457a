"""The trajectories of one optimizer update, cut into micro-batches of tensors.

Life-cycle: trajectories of an update -> `micro_batches` (those of this rank) -> forward pass
over `rows` -> `spread` puts what it gives for N tokens into [B, T] -> loss.

Letters: B trajectories of a micro-batch, T tokens (padded), N tokens in the loss.
"""

# ruff: noqa: N815  shape letters in field names
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo2.config_loss import LossTable
from echo2_learner.batch import Trajectory
from echo2_learner.head import Rows
from echo2_learner.losses.shares import token_shares
from echo2_learner.packing import (
    Bundle,
    bundles_of,
    flat_rows,
    padded_rows,
    plan,
    row_length,
    rows_of,
    single_bundles,
)

Layout = Literal["tree", "flat", "padded"]
"""Rows of bundles with common beginnings, one long row, or one trajectory a row."""


BUNDLE_NODES_MAX: Final = 8192
"""A mask of a row has the square of this many entries."""
LONG_ROWS: Final = 8
"""A bundle of so many times the length of a good row is long."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`rows` for the forward pass, the rest for the loss.

    `place_N` flat index into [B * T] of the tokens in the loss, in the order of `rows`.
    `has_gradient` is False where no trajectory has an advantage: it is measured only.
    `trajectories` are those of the B rows.
    """

    rows: Rows
    place_N: Tensor
    behaviour_BT: Tensor
    mask_BT: Tensor
    advantages_B: Tensor
    shares_BT: Tensor
    has_gradient: bool
    trajectories: tuple[Trajectory, ...] = ()

    def spread(self, values_N: Tensor) -> Tensor:
        """[B, T] the values at their places, 0.0 elsewhere; the gradient passes through."""
        flat = values_N.new_zeros(self.mask_BT.numel())
        return flat.scatter(0, self.place_N, values_N).view(self.mask_BT.shape)

    def gather(self, values_BT: Tensor) -> Tensor:
        """[N] the values of the tokens in the loss, in the order of `rows`."""
        return values_BT.reshape(-1)[self.place_N]


@dataclass(frozen=True, slots=True)
class Cut:
    """How an update is cut: the same on all ranks, but for `rank`.

    `pair_cost` as in `packing.bundles_of`; `length` is the constant of aggregate = "constant".
    """

    tokens_max: int
    layout: Layout = "tree"
    pair_cost: float = 1e-3
    length: int = 1
    rank: int = 0
    num_ranks: int = 1
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    """Of the logprobs."""
    compute_dtype: torch.dtype = torch.float32
    """Of the model's activations."""


def micro_batches(
    trajectories: Sequence[Trajectory], cut: Cut, table: LossTable
) -> list[MicroBatch]:
    """This rank's micro-batches of one update, first those with a gradient.

    Every rank has as many of both kinds as any other; some may be empty. Trajectories without
    a token in the loss are left out. The shares refer to the whole update, so the sum of all
    ranks' micro-batches' losses is the update's loss.
    """
    rows = [t for t in trajectories if t.loss_mask.any()]
    counts = {
        "num_trajectories": len(rows),
        "num_tokens": sum(t.num_loss_tokens for t in rows),
        "length": cut.length,
    }
    # A group's trajectories stay together, for they begin alike.
    with_advantage = {t.group for t in rows if t.advantage != 0.0 or table.kl_coefficient > 0}
    made = []
    for has_gradient in (True, False):
        some = [t for t in rows if (t.group in with_advantage) == has_gradient]
        for layout, bundles in _bundles_by_micro_batch(some, cut):
            made.append(_micro_batch(some, bundles, layout, cut, table, counts, has_gradient))
    return made


def _bundles_by_micro_batch(
    trajectories: Sequence[Trajectory], cut: Cut
) -> Iterator[tuple[Layout, list[Bundle]]]:
    """This rank's, with the layout of each. Long bundles have rows of their own, beside others
    of like length: short ones in such a row would pay for its length."""
    sequences = [t.token_ids for t in trajectories]
    if cut.layout != "tree":
        yield from _planned(single_bundles(sequences), cut.layout, cut)
        return
    nodes_max = min(cut.tokens_max, BUNDLE_NODES_MAX)
    bundles = bundles_of(sequences, pair_cost=cut.pair_cost, nodes_max=nodes_max)
    long_from = LONG_ROWS * row_length(cut.pair_cost)
    yield from _planned([b for b in bundles if b.num_nodes < long_from], "tree", cut)
    yield from _planned([b for b in bundles if b.num_nodes >= long_from], "padded", cut)


def _planned(
    bundles: Sequence[Bundle], layout: Layout, cut: Cut
) -> Iterator[tuple[Layout, list[Bundle]]]:
    planned = plan(
        [bundle.num_nodes for bundle in bundles],
        tokens_max=cut.tokens_max,
        num_ranks=cut.num_ranks,
        padded=layout == "padded",
    )
    for chosen in planned[cut.rank]:
        yield layout, [bundles[index] for index in chosen]


def _micro_batch(
    trajectories: Sequence[Trajectory],
    bundles: Sequence[Bundle],
    layout: Layout,
    cut: Cut,
    table: LossTable,
    counts: dict[str, int],
    has_gradient: bool,
) -> MicroBatch:
    if not bundles:
        return _empty(cut, has_gradient)
    sequences = [t.token_ids for t in trajectories]
    masks = [t.loss_mask for t in trajectories]
    match layout:
        case "tree":
            packed = rows_of(bundles, sequences, masks, pair_cost=cut.pair_cost)
        case "flat":
            packed = flat_rows(bundles, sequences, masks)
        case "padded":
            packed = padded_rows(bundles, sequences, masks)
    members = sorted(index for bundle in bundles for index in bundle.members)
    chosen = [trajectories[index] for index in members]
    mask_BT = padded([t.loss_mask for t in chosen])
    shares_BT = token_shares(mask_BT, aggregate=table.aggregate, dtype=cut.dtype, **counts)
    return MicroBatch(
        rows=Rows.of(packed, device=torch.device(cut.device), dtype=cut.compute_dtype),
        place_N=torch.from_numpy(packed.place_N).to(cut.device),
        behaviour_BT=padded([t.logprobs for t in chosen]).to(cut.device, cut.dtype),
        mask_BT=mask_BT.to(cut.device),
        advantages_B=torch.tensor(
            [t.advantage for t in chosen], device=cut.device, dtype=cut.dtype
        ),
        shares_BT=shares_BT.to(cut.device),
        has_gradient=has_gradient,
        trajectories=tuple(chosen),
    )


def _empty(cut: Cut, has_gradient: bool) -> MicroBatch:
    """One token through the whole model, and nothing in the loss: gradients of zero. A rank
    without work takes part in the collective calls of the others with it."""
    token = np.zeros(1, dtype=np.int32)
    packed = padded_rows(single_bundles([token]), [token], [np.zeros(1, dtype=np.bool_)])
    zeros_BT = torch.zeros((1, 1), device=cut.device, dtype=cut.dtype)
    return MicroBatch(
        rows=Rows.of(packed, device=torch.device(cut.device), dtype=cut.compute_dtype),
        place_N=torch.zeros(0, dtype=torch.long, device=cut.device),
        behaviour_BT=zeros_BT,
        mask_BT=zeros_BT.bool(),
        advantages_B=zeros_BT[0],
        shares_BT=zeros_BT,
        has_gradient=has_gradient,
    )


def padded(rows: Sequence[npt.NDArray[np.generic]]) -> Tensor:
    """[B, T] the rows one below the other, filled up with zeros on the right."""
    block = np.zeros((len(rows), max(len(row) for row in rows)), dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        block[index, : len(row)] = row
    return torch.from_numpy(block)
