"""Audits in work: each order is a task that plays a group again and reports one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from echo2.core.worker_events import AuditEnded, Event
from echo2.errors import EnvironmentError_
from echo2.messages import AuditDone, AuditFailed, AuditOrdered
from echo2_workers.groups import Environments
from echo2_workers.playing import told
from echo2_workers.replaying import ReplayJob

log = structlog.get_logger(__name__)


class Audits:
    """`post` takes the outcome's event."""

    def __init__(
        self,
        environments: Environments,
        *,
        rollout_timeout_s: float,
        post: Callable[[Event], None],
    ) -> None:
        self._environments = environments
        self._rollout_timeout_s = rollout_timeout_s
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, order: AuditOrdered) -> None:
        task = asyncio.create_task(self._play(order), name=f"audit.{order.lease}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _play(self, order: AuditOrdered) -> None:
        self._post(AuditEnded(await self._answer(order)))

    async def _answer(self, order: AuditOrdered) -> AuditDone | AuditFailed:
        job = ReplayJob(
            task=order.task,
            sampling=order.sampling,
            trajectories=order.trajectories,
            token_ids=order.token_ids,
            loss_mask=order.loss_mask,
        )
        try:
            async with asyncio.timeout(self._rollout_timeout_s):
                replayed = await self._environments.replay_group(job)
            return AuditDone(
                lease=order.lease,
                group=order.group,
                rewards=replayed.rewards,
                problem=replayed.problem,
            )
        except TimeoutError:
            text = (
                f"it took more than {self._rollout_timeout_s:g} s (environment.rollout_timeout_s)"
            )
        except EnvironmentError_ as error:
            text = str(error)
        except Exception as error:  # whatever it is, the coordinator must hear that none comes
            log.exception("audit_crashed", lease=order.lease)
            text = told(error)
        return AuditFailed(lease=order.lease, group=order.group, text=text[:2048])
