"""Who is an auditor says the operator, and who is quarantined stays so until the operator says."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from echo2 import wire
from echo2.config import Config
from echo2.core.records import LearnerRecorded
from echo2.ledger.database import Database
from echo2.ledger.durable import FILE
from echo2.messages import AuditDone, AuditFailed, Enrolled, Lane, Refused
from echo2.net.keys import KeyPair
from echo2.pardons import FOLDER, write_pardon
from echo2.types import GroupId, LeaseId

from .ground import a_config, a_ground, a_hello, an_enrolment, answer_of, until


def audited() -> Config:
    return a_config(audit={"share": 0.5, "workers": ["joined-1"]})


async def test_a_worker_that_calls_itself_an_auditor_is_none(tmp_path: Path) -> None:
    async with a_ground(tmp_path, audited()) as ground:
        control, rollouts = await ground.says_hello(ground.a_peer("w-1"), "w-1")
        assert control.send(replace(a_hello("w-1"), replays=True))
        await until(lambda: ground.state()["workers"] == ["w-1"])
        with ground.unchanged():
            for answer in (
                AuditDone(lease=LeaseId("l.1"), group=GroupId("g1"), rewards=(0.0,)),
                AuditFailed(lease=LeaseId("l.1"), group=GroupId("g1"), text="no"),
            ):
                assert rollouts.send(answer)
            await ground.counts("not_an_auditor", 2)


async def test_a_machine_with_a_token_does_not_get_an_auditor_s_name(tmp_path: Path) -> None:
    async with a_ground(tmp_path, audited()) as ground:
        _, keys = ground.a_token(now=time.time(), prefix="joined", uses=2)
        for wish in ("joined-1", ""):
            dealer = await ground.gets_in(Lane.ENROLMENT, keys)
            assert dealer.send(an_enrolment(KeyPair.generate().public, wish))
            answer = await answer_of(dealer)
            assert isinstance(answer, Enrolled)
            assert answer.name != "joined-1"
        assert "joined-1" not in ground.allow_list.names()


async def test_an_order_to_audit_is_the_coordinator_s_to_give(tmp_path: Path) -> None:
    """The header of an order, as a worker would send it to the coordinator."""
    async with a_ground(tmp_path) as ground:
        keys = ground.a_peer("w-1")
        with ground.unchanged():
            raw = ground.raw(ground.endpoints[Lane.ROLLOUTS], keys)
            raw.send_multipart([wire.pack(["AuditOrdered", {"lease": "l.1", "group": "g1"}])])
            await ground.counts("wrong_sender")


async def test_a_quarantined_key_is_refused_until_the_operator_pardons_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    database = Database(run_dir / FILE)
    told = {"cause": "rewards", "reason": "2 were refuted", "step": 0, "in_training": []}
    with database.transaction():
        database.learner(LearnerRecorded(1, 0))
        database.observe("worker_quarantined", {"worker": "w-1", **told}, 0)
    database.close()
    async with a_ground(tmp_path) as ground:
        control, _ = await ground.says_hello(ground.a_peer("w-1"), "w-1")
        refused = await answer_of(control)
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.fatal) == ("quarantined", True)
        assert ground.state()["workers"] == []
        assert ground.coordinator.status()["quarantined"].keys() == {"w-1"}
        write_pardon(run_dir, "w-1")
        await until(lambda: ground.events("worker_pardoned"))
        assert list((run_dir / FOLDER).iterdir()) == []
        assert control.send(a_hello("w-1"))
        await until(lambda: ground.state()["workers"] == ["w-1"])
