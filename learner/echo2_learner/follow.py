"""The followers' loop: one order of rank 0 after the other, until the end.

Each order is carried out together with rank 0, which does the same in `Parts`. A follower
decides nothing, writes nothing but its rows of a checkpoint, and talks to no coordinator.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from echo2.errors import LearnerError
from echo2_learner.batch import TrainingBatch
from echo2_learner.batch_bytes import batch_from_bytes
from echo2_learner.final_folder import help_save_final
from echo2_learner.rank_parts import RankParts
from echo2_learner.ranks import END

log = structlog.get_logger(__name__)


def follow(parts: RankParts) -> None:
    """Returns when rank 0 says that it is the end. RankLostError when it is gone."""
    log.info("rank_ready", rank=parts.ranks.rank, ranks=parts.ranks.size)
    batch: TrainingBatch | None = None
    while True:
        order = parts.ranks.next_order()
        match order.name:
            case "train":
                batch = batch_from_bytes(order.payload)
                parts.trainer.step(batch)
            case "check" if batch is not None:
                parts.publisher.versions.take(order.arguments["known"])
                parts.check.check(batch)
            case "publish":
                parts.publisher.help()
            case "save":
                folder = Path(order.arguments["folder"])
                parts.checkpoints.help_save(folder, parts.policy, parts.trainer)
            case "final":
                help_save_final(parts.policy)
            case name if name == END:
                log.info("rank_ended", rank=parts.ranks.rank)
                return
            case _:
                raise LearnerError(
                    f'rank 0 ordered "{order.name}", which this rank does not know; all ranks '
                    "must run the same echo2"
                )
