"""A revoked key is served nothing, its work goes to others, and it does not come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from echo2.learner_client import LearnerClient
from echo2.learner_transport import SocketTransport
from echo2.messages import (
    Heartbeat,
    Lane,
    LeaseGranted,
    ManifestRequest,
    Message,
    RelayPeers,
    VersionAnnounced,
    VersionInstalled,
    VersionPublished,
    WorkerWelcome,
)
from echo2.net.dealer import Dealer
from echo2.types import Task, Version

from .ground import Ground, a_ground, a_hello, an_origin, answer_of, until

V0 = Version(1, 0)


def endless(start: int, count: int) -> tuple[list[Task], bool]:
    return [Task(i, "{}") for i in range(start, start + count)], False


async def hears(dealer: Dealer, kind: type[Message]) -> Message:
    while not isinstance(message := await answer_of(dealer), kind):
        pass
    return message


async def works(ground: Ground, name: str) -> tuple[Dealer, Dealer]:
    """A worker that serves the newest version, and so gets leases."""
    control, rollouts = await ground.says_hello(ground.a_peer(name), name)
    await hears(control, WorkerWelcome)
    announced = await hears(control, VersionAnnounced)
    assert isinstance(announced, VersionAnnounced)
    installed = VersionInstalled(
        version=announced.version,
        manifest_digest=announced.manifest_digest,
        fetch_s=0,
        install_s=0,
        pause_s=0,
    )
    assert control.send(installed)
    return control, rollouts


def revoke(ground: Ground, name: str) -> None:
    """As `echo2 keys revoke` does, in another process."""
    (ground.run_dir / "keys" / "authorized" / f"{name}.pub").unlink()


async def test_a_revoked_worker_s_leases_go_to_others_though_it_is_not_silent(
    tmp_path: Path,
) -> None:
    async with a_ground(tmp_path) as ground:
        config = ground.coordinator.config
        client = LearnerClient(SocketTransport(config, ground.run_dir), tasks=endless)
        try:
            await client.start(resume_step=0)
            await client.publish(
                VersionPublished(
                    version=V0,
                    manifest_digest="0" * 64,
                    assets_digest="",
                    num_bytes=1,
                    origin="",
                    origin_key="",
                )
            )
            first, _ = await works(ground, "w-1")
            granted = await hears(first, LeaseGranted)
            assert isinstance(granted, LeaseGranted)
            before = ground.refused.get("revoked", 0)
            revoke(ground, "w-1")
            await until(lambda: ground.events("worker_gone"))
            (gone,) = ground.events("worker_gone")
            assert (gone["worker"], gone["reason"]) == ("w-1", "its key was revoked")
            second, _ = await works(ground, "w-2")
            again = {granted.group}
            while again:
                lease = await hears(second, LeaseGranted)
                assert isinstance(lease, LeaseGranted)
                again.discard(lease.group)
            served = first.counters["received"]
            assert first.send(Heartbeat(sequence=1, state="ready", lease_tokens={}))
            await ground.counts("revoked", before + 1)
            assert first.counters["received"] == served, "not even an echo"
        finally:
            await client.close("test over", finished=False)


async def test_a_revoked_key_is_refused_at_its_next_handshake(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        keys = ground.a_peer("w-1")
        await ground.says_hello(keys, "w-1")
        await until(lambda: ground.state()["workers"] == ["w-1"])
        revoke(ground, "w-1")
        await until(lambda: ground.state()["workers"] == [])
        with ground.unchanged():
            for lane in (Lane.CONTROL, Lane.ROLLOUTS):
                await ground.is_refused(lane, keys)
        await ground.counts("stranger", 2)


async def test_a_name_that_went_to_another_key_is_the_other_s_alone(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        old, _ = await ground.says_hello(ground.a_peer("w-1"), "w-1")
        await hears(old, WorkerWelcome)
        (ground.run_dir / "keys" / "w-1.key").unlink()
        keys = ground.a_peer("w-1")  # a new one
        await until(lambda: ground.events("worker_gone"))
        new, _ = await ground.says_hello(keys, "w-1")
        await hears(new, WorkerWelcome)
        served = old.counters["received"]
        assert old.send(Heartbeat(sequence=1, state="ready", lease_tokens={}))
        await ground.counts("revoked")
        assert old.counters["received"] == served
        assert ground.state()["workers"] == ["w-1"]


async def test_the_other_workers_relays_are_told_of_a_revoked_key(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        controls = []
        for name in ("w-1", "w-2"):
            keys = ground.a_peer(name)
            controls.append(await ground.gets_in(Lane.CONTROL, keys))
            assert controls[-1].send(replace(a_hello(name), relay_key=keys.public))
        known = await hears(controls[1], RelayPeers)
        assert isinstance(known, RelayPeers)
        while [peer.name for peer in known.peers] != ["w-1", "w-2"]:
            known = await hears(controls[1], RelayPeers)
            assert isinstance(known, RelayPeers)
        revoke(ground, "w-1")
        known = await hears(controls[1], RelayPeers)
        assert isinstance(known, RelayPeers)
        assert [peer.name for peer in known.peers] == ["w-2"]


async def test_the_origin_serves_a_revoked_key_nothing(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground, an_origin(ground) as (origin, digest):
        keys = ground.a_peer("w-1")
        more = {"endpoint": origin.endpoint, "server_key": origin.public_key}
        dealer = await ground.gets_in(Lane.CHUNKS, keys, **more)
        assert dealer.send(ManifestRequest(manifest_digest=digest))
        await until(lambda: dealer.counters["received"] == 1)
        revoke(ground, "w-1")
        assert origin._router is not None
        router = origin._router
        await until(lambda: not router.peers())
        assert dealer.send(ManifestRequest(manifest_digest=digest))
        await until(lambda: router.refused["revoked"])
        assert dealer.counters["received"] == 1
        await ground.is_refused(Lane.CHUNKS, keys, **more)
