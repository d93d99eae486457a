"""Join tokens open the enrolment socket, once each, while they live; and no other door."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from echo2 import wire
from echo2.messages import PROTOCOL, Enrolled, EnrolRefused, Lane, Role
from echo2.net.auth import KeyPair
from echo2.net.token_book import RETRY_S

from .ground import Ground, a_ground, a_hello, an_enrolment, answer_of, until


async def enrols(ground: Ground, token: KeyPair, public_key: str, name: str = "") -> Enrolled:
    dealer = await ground.gets_in(
        Lane.ENROLMENT, token, greeting=lambda: an_enrolment(public_key, name)
    )
    answer = await answer_of(dealer)
    assert isinstance(answer, Enrolled)
    return answer


async def is_told(ground: Ground, token: KeyPair, public_key: str, reason: str) -> None:
    """Let in at the handshake, and refused at the message; counted and recorded."""
    dealer = await ground.gets_in(Lane.ENROLMENT, token, greeting=lambda: an_enrolment(public_key))
    answer = await answer_of(dealer)
    assert isinstance(answer, EnrolRefused)
    assert answer.reason == reason
    await ground.counts(reason)
    assert ground.events("enrolment_refused")[-1]["reason"] == reason


async def test_a_live_token_lets_a_new_key_in_as_a_worker(tmp_path: Path) -> None:
    """What it is for, so that the tests below mean something."""
    mine = KeyPair.generate()
    async with a_ground(tmp_path) as ground:
        record, token = ground.a_token(now=time.time(), prefix="far")
        answer = await enrols(ground, token, mine.public)
        assert answer.name == "far-1"
        assert answer.control == ground.endpoints[Lane.CONTROL]
        assert (answer.run_id, answer.server_key) == (ground.coordinator.run_id, ground.server_key)
        (event,) = ground.events("worker_enrolled")
        assert (event["worker"], event["token"]) == ("far-1", record.id)
        await ground.says_hello(mine, "far-1")
        await until(lambda: ground.state()["workers"] == ["far-1"])


async def test_an_expired_token_is_refused_at_the_handshake(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        _, token = ground.a_token(now=time.time() - 7200)
        with ground.unchanged():
            await ground.is_refused(Lane.ENROLMENT, token)
        await ground.counts("token_expired")
        assert ground.events("handshake_refused")[-1]["reason"] == "token_expired"


async def test_a_token_that_expires_while_it_is_connected_lets_nobody_in(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        record, token = ground.a_token(now=time.time())
        dealer = await ground.gets_in(Lane.ENROLMENT, token)
        path = ground.book.folder / f"{record.id}.json"
        expired = record.model_copy(update={"expires_at": time.time() - 1})
        aside = path.with_suffix(".aside")
        aside.write_text(expired.model_dump_json())
        aside.rename(path)
        with ground.unchanged():
            dealer.send(an_enrolment(KeyPair.generate().public))
            await ground.counts("revoked")
        assert dealer.counters["received"] == 0


async def test_a_used_up_token_lets_no_other_key_in(tmp_path: Path) -> None:
    first, second = KeyPair.generate(), KeyPair.generate()
    async with a_ground(tmp_path) as ground:
        _, token = ground.a_token(now=time.time())
        await enrols(ground, token, first.public)
        with ground.unchanged():
            await is_told(ground, token, second.public, "token_used_up")
            assert (await enrols(ground, token, first.public)).name == "joined-1"
        await ground.is_refused(Lane.CONTROL, second)


async def test_a_token_that_was_used_up_long_ago_is_refused_at_the_handshake(
    tmp_path: Path,
) -> None:
    async with a_ground(tmp_path) as ground:
        before = time.time() - RETRY_S - 60
        record, token = ground.a_token(now=before)
        ground.book.enrol(record.id, KeyPair.generate().public, now=before)
        with ground.unchanged():
            await ground.is_refused(Lane.ENROLMENT, token)
        await ground.counts("token_used_up")


async def test_a_revoked_token_is_refused_at_the_handshake(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        record, token = ground.a_token(now=time.time())
        ground.book.revoke(record.id)
        with ground.unchanged():
            await ground.is_refused(Lane.ENROLMENT, token)
        await ground.counts("token_unknown")


async def test_two_machines_with_one_token_at_once_spend_its_uses_and_no_more(
    tmp_path: Path,
) -> None:
    async with a_ground(tmp_path) as ground:
        record, token = ground.a_token(now=time.time(), uses=3)
        dealers = []
        for _ in range(6):
            key = KeyPair.generate().public
            dealers.append(
                await ground.dials(
                    Lane.ENROLMENT, token, greeting=lambda key=key: an_enrolment(key)
                )
            )
        answers = [await answer_of(dealer) for dealer in dealers]
        names = sorted(a.name for a in answers if isinstance(a, Enrolled))
        assert names == ["joined-1", "joined-2", "joined-3"]
        assert ground.refused["token_used_up"] == 3
        assert [r.uses_left for r in ground.book.records() if r.id == record.id] == [0]


@pytest.mark.parametrize("lane", [Lane.CONTROL, Lane.ROLLOUTS])
async def test_a_token_s_key_opens_no_other_socket(tmp_path: Path, lane: Lane) -> None:
    async with a_ground(tmp_path) as ground:
        _, token = ground.a_token(now=time.time())
        with ground.unchanged():
            await ground.is_refused(lane, token, greeting=a_hello)
        await ground.counts("stranger")


@pytest.mark.parametrize("name", ["w-1", "learner"])
async def test_the_key_of_a_peer_does_not_open_the_enrolment_socket(
    tmp_path: Path, name: str
) -> None:
    """A worker cannot let others in."""
    async with a_ground(tmp_path) as ground:
        ground.a_token(now=time.time())
        keys = ground.a_peer(name)
        with ground.unchanged():
            await ground.is_refused(
                Lane.ENROLMENT, keys, greeting=lambda: an_enrolment(KeyPair.generate().public)
            )
        await ground.counts("token_unknown")


async def test_a_token_does_not_rename_or_replace_a_peer(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        learner, worker = ground.a_peer("learner"), ground.a_peer("w-1")
        _, token = ground.a_token(now=time.time(), uses=5)
        with ground.unchanged():
            await is_told(ground, token, learner.public, "key_taken")
            assert (await enrols(ground, token, worker.public, "joined-9")).name == "w-1"


async def test_nothing_but_a_request_is_taken_on_the_enrolment_socket(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        _, token = ground.a_token(now=time.time())
        raw = ground.raw(ground.endpoints[Lane.ENROLMENT], token)
        refused = Enrolled(
            protocol=PROTOCOL,
            name="w",
            run_id="",
            control="",
            rollouts="",
            server_key=token.public,
            settings="",
        )
        with ground.unchanged():
            for frames in (wire.encode(a_hello()), wire.encode(refused), [b"\xc1"], [b"x"] * 99):
                raw.send_multipart(frames)
            for reason in ("wrong_lane", "wrong_sender", "malformed", "frames"):
                await ground.counts(reason)
            assert not raw.poll(0)


@pytest.mark.parametrize(
    "name", ["../../coordinator", "/etc/x", "..", ".ssh", "a/b", "a\x00b", "learner\n", "x" * 65]
)
async def test_a_wanted_name_that_leads_out_of_the_folder_is_refused_unread(
    tmp_path: Path, name: str
) -> None:
    async with a_ground(tmp_path) as ground:
        _, token = ground.a_token(now=time.time())
        raw = ground.raw(ground.endpoints[Lane.ENROLMENT], token)
        fields = {
            "protocol": PROTOCOL,
            "echo2_version": "0",
            "public_key": KeyPair.generate().public,
            "name": name,
        }
        with ground.unchanged():
            raw.send_multipart([wire.pack(["Enrol", fields])])
            await ground.counts("malformed")
            assert not raw.poll(0)


@pytest.mark.parametrize("name", ["learner", "learner-9", "coordinator", "origin", "w-1"])
async def test_a_wanted_name_of_somebody_else_is_not_given(tmp_path: Path, name: str) -> None:
    mine = KeyPair.generate()
    async with a_ground(tmp_path) as ground:
        ground.a_peer("w-1")
        _, token = ground.a_token(now=time.time())
        assert (await enrols(ground, token, mine.public, name)).name == "joined-1"
        dealer = await ground.gets_in(Lane.CONTROL, mine, role=Role.WORKER)
        assert dealer.send(a_hello(name))
        await until(lambda: ground.state()["workers"] == ["joined-1"])
        assert ground.state()["learner"] is None
