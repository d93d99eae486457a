"""A real daemon process against a small scripted coordinator: CURVE, pipes, signals."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from echo2.config import config_from_mapping
from echo2.messages import (
    PROTOCOL,
    Draining,
    Goodbye,
    GroupAcknowledged,
    GroupResult,
    Heartbeat,
    HeartbeatEcho,
    InstallFailed,
    Lane,
    LeaseFailed,
    LeaseGranted,
    LeaseRevoked,
    Message,
    Refused,
    Role,
    Shutdown,
    VersionAnnounced,
    VersionInstalled,
    WorkerHello,
    WorkerWelcome,
)
from echo2.net.auth import AllowList, Authenticator, load_or_create_key
from echo2.net.router import Router
from echo2.net.sockets import close_context, make_context
from echo2.types import GroupId, LeaseId, PeerId, Sampling, Task, Version
from echo2.weights.adapter import LORA_A, LORA_B, AdapterBase
from echo2.weights.delta import write_delta
from echo2.weights.origin import Origin
from echo2.weights.store import open_version, write_assets, write_version

DEADLINE_S = 240.0
M = TypeVar("M", bound=Message)


class ScriptedCoordinator:
    """Two routers; answers hellos and heartbeats, records the rest for the test."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.run_id = "run-1"
        self.environment = "null"
        self.settings = "{}"
        self.assets_digest = ""
        self.origin: Origin | None = None
        self.silence_max_s = 15.0
        self.echoes = True
        self.peer = PeerId("")
        self.heard: list[Message] = []
        self._arrived = asyncio.Condition()
        self._context = make_context()
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ScriptedCoordinator:
        self._exit.push_async_callback(close_context, self._context)
        keys = load_or_create_key(self.run_dir / "keys" / "coordinator.key")
        authenticator = Authenticator(
            self._context, AllowList(self.run_dir / "keys" / "authorized")
        )
        await authenticator.start()
        self._exit.push_async_callback(authenticator.stop)
        self._routers = {
            lane: Router(
                self._context,
                lane=lane,
                role=Role.COORDINATOR,
                bind="tcp://127.0.0.1:*",
                keys=keys,
                on_message=self._on_message,
            )
            for lane in (Lane.CONTROL, Lane.ROLLOUTS)
        }
        for router in self._routers.values():
            await router.start()
            self._exit.push_async_callback(router.stop)
        record = {
            "run_id": self.run_id,
            "control": self._routers[Lane.CONTROL].endpoint,
            "rollouts": self._routers[Lane.ROLLOUTS].endpoint,
            "http": "",
            "public_key": keys.public,
            "pid": os.getpid(),
        }
        (self.run_dir / "coordinator.json").write_text(json.dumps(record))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    async def start_origin(self) -> None:
        self.origin = Origin(self._context, config_from_mapping({}), self.run_dir)
        await self.origin.start()
        self._exit.push_async_callback(self.origin.stop)

    def send(self, message: Message) -> None:
        assert self._routers[message.LANE].send(self.peer, message)

    async def hear(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of this kind that was not taken yet; earlier others stay."""
        async with self._arrived:
            while True:
                for message in self.heard:
                    if isinstance(message, kind) and where(message):
                        self.heard.remove(message)
                        return message
                await self._arrived.wait()

    async def installed(self, version: Version) -> VersionInstalled:
        """This version serves now. What served before a lost connection, and is told again for
        the record, says nothing of now."""
        return await self.hear(VersionInstalled, lambda m: m.version == version and not m.past)

    def _on_message(self, peer: PeerId, message: Message) -> None:
        self.peer = peer
        if isinstance(message, Heartbeat) and self.echoes:
            self.send(HeartbeatEcho(sequence=message.sequence))
        self.heard.append(message)
        del self.heard[:-200]
        task = asyncio.ensure_future(self._notify())
        self._exit.callback(task.cancel)

    async def _notify(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    async def welcome(self) -> WorkerHello:
        hello = await self.hear(WorkerHello)
        self.send(
            WorkerWelcome(
                protocol=PROTOCOL,
                run_id=self.run_id,
                worker=self.peer,
                heartbeat_interval_s=0.2,
                silence_max_s=self.silence_max_s,
                environment=self.environment,
                settings=self.settings,
                assets_digest=self.assets_digest,
                origin=self.origin.endpoint if self.origin else "",
                origin_key=self.origin.public_key if self.origin else "",
                alive=hello.held,
            )
        )
        return hello

    def announce(self, version: Version, digest: str = "0" * 64, **probe: Any) -> None:
        self.send(
            VersionAnnounced(
                version=version,
                manifest_digest=digest,
                num_bytes=0,
                origin=self.origin.endpoint if self.origin else "",
                origin_key=self.origin.public_key if self.origin else "",
                assets_digest=self.assets_digest,
                **probe,
            )
        )

    def lease(self, number: int, version: Version, payload: str = "{}", **other: Any) -> None:
        values: dict[str, Any] = {
            "lease": LeaseId(f"lease-{number}"),
            "group": GroupId(f"group-{number}"),
            "attempt": 1,
            "kind": "train",
            "version": version,
            "task": Task(number, payload),
            "group_size": 4,
            "sampling": Sampling(max_tokens=5),
            "seed": 1000 * number,
            "revoke_after_s": 60.0,
        }
        self.send(LeaseGranted(**(values | other)))

    def acknowledge(self, result: GroupResult) -> None:
        self.send(GroupAcknowledged(group=result.group, lease=result.lease, outcome="accepted"))


@contextlib.asynccontextmanager
async def a_daemon(
    run_dir: Path, *settings: str, config: str = "", name: str = "w-1"
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker daemon in a process of its own; ended, by force if need be, with the block."""
    path = run_dir / "config.toml"
    path.write_text(config)
    overrides = [part for setting in settings for part in ("--set", setting)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "echo2_workers", str(path), "--run-dir", str(run_dir)),
        *(["--name", name] if name else []),
        *overrides,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        _, stderr = await process.communicate()
        print(stderr.decode(), file=sys.stderr)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await coroutine

    asyncio.run(within_deadline())


NULL = (
    "worker.engine=null",
    "environment.name=null",
    "worker.null.tokens_mean=20",
    "worker.null.tokens_per_s=20",
)
V0, V1, V2 = Version(1, 0), Version(1, 1), Version(1, 2)


def test_a_null_worker_joins_installs_plays_and_drains(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            ScriptedCoordinator(tmp_path) as coordinator,
            a_daemon(tmp_path, *NULL) as worker,
        ):
            hello = await coordinator.welcome()
            assert hello.engine == "null"
            assert hello.environment_version == "1"
            assert coordinator.peer == "w-1"
            coordinator.announce(V0)
            installed = await coordinator.installed(V0)
            assert installed.canary_diff is None
            coordinator.lease(1, V0)
            result = await coordinator.hear(GroupResult)
            assert (result.lease, result.group, result.attempt) == ("lease-1", "group-1", 1)
            assert len(result.trajectories) == 4
            assert all(t.spans[0].version == V0 for t in result.trajectories)
            coordinator.acknowledge(result)
            heartbeat = await coordinator.hear(Heartbeat, lambda h: h.state == "ready")
            assert heartbeat.loop_lag_s < 60
            coordinator.lease(2, V0, group_size=1, sampling=Sampling(max_tokens=100_000))
            await coordinator.hear(Heartbeat, lambda h: "lease-2" in h.lease_tokens)
            worker.send_signal(signal.SIGTERM)
            await coordinator.hear(Draining)
            last = await coordinator.hear(GroupResult)
            coordinator.acknowledge(last)
            assert (await coordinator.hear(Goodbye)).reason == "SIGTERM"
            assert await worker.wait() == 0

    run(scenario())


def test_a_drain_hands_back_what_is_not_done_in_time(tmp_path: Path) -> None:
    slow = (*NULL, "worker.null.tokens_per_s=1", "worker.drain_timeout_s=0.5")

    async def scenario() -> None:
        async with (
            ScriptedCoordinator(tmp_path) as coordinator,
            a_daemon(tmp_path, *slow) as worker,
        ):
            await coordinator.welcome()
            coordinator.announce(V0)
            await coordinator.installed(V0)
            coordinator.lease(1, V0, sampling=Sampling(max_tokens=1000))
            await coordinator.hear(Heartbeat, lambda h: "lease-1" in h.lease_tokens)
            worker.send_signal(signal.SIGINT)
            failed = await coordinator.hear(LeaseFailed)
            assert (failed.lease, failed.stage) == ("lease-1", "draining")
            await coordinator.hear(Goodbye)
            assert await worker.wait() == 0

    run(scenario())


def test_a_silent_coordinator_is_dialled_again_and_results_are_sent_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            ScriptedCoordinator(tmp_path) as coordinator,
            a_daemon(tmp_path, *NULL) as worker,
        ):
            coordinator.silence_max_s = 1.0
            await coordinator.welcome()
            coordinator.announce(V0)
            await coordinator.installed(V0)
            coordinator.lease(1, V0)
            first = await coordinator.hear(GroupResult)
            coordinator.echoes = False
            hello = await coordinator.welcome()
            assert hello.held == ("lease-1",)
            assert hello.installed == V0
            coordinator.echoes = True
            again = await coordinator.hear(GroupResult)
            assert again == first
            coordinator.acknowledge(again)
            coordinator.send(Shutdown(reason="the run is over", finished=True))
            await coordinator.hear(Goodbye)
            assert await worker.wait() == 0

    run(scenario())


def test_a_refused_worker_ends_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            ScriptedCoordinator(tmp_path) as coordinator,
            a_daemon(tmp_path, *NULL) as worker,
        ):
            await coordinator.hear(WorkerHello)
            coordinator.send(Refused(reason="environment", text="pip install x", fatal=True))
            assert await worker.wait() == 1
            assert worker.stderr is not None
            assert b"pip install x" in await worker.stderr.read()

    run(scenario())


def test_without_a_coordinator_the_daemon_says_so_and_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_daemon(tmp_path, *NULL, "net.connect_timeout_s=0.5") as worker:
            assert await worker.wait() == 1
            assert worker.stderr is not None
            stderr = await worker.stderr.read()
            assert b"coordinator.json" in stderr
            assert b"net.connect_timeout_s" in stderr

    run(scenario())


def test_two_daemons_never_share_a_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            ScriptedCoordinator(tmp_path) as coordinator,
            a_daemon(tmp_path, *NULL, name=""),
            a_daemon(tmp_path, *NULL, name=""),
        ):
            names = {(await coordinator.hear(WorkerHello)).name for _ in range(2)}
            assert len(names) == 2
            (taken,) = [name for name in names if name.endswith("-1")]
            async with a_daemon(tmp_path, *NULL, name=taken) as third:
                assert await third.wait() == 2
                assert third.stderr is not None
                assert b"another daemon" in await third.stderr.read()

    run(scenario())


# --------------------------------------------------------------- with a model and an origin


def a_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model: Any = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    return model


def publish(run_dir: Path, model: Any) -> str:
    """Write the model's weights as a version; its manifest's digest."""
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    manifest = write_version(
        run_dir / "versions",
        (
            (name, "F32", tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
            for name, tensor in state.items()
        ),
    )
    return manifest.manifest_digest


def publish_assets(run_dir: Path, model: Any) -> str:
    folder = run_dir / "model"
    folder.mkdir()
    model.config.save_pretrained(folder)
    manifest = write_assets(run_dir / "versions", {"config.json": folder / "config.json"})
    return manifest.manifest_digest


def a_probe(model: Any) -> dict[str, Any]:
    """What the publisher sends for the canary: two sequences of six tokens."""
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6) + 3
    with torch.no_grad():
        ids = torch.tensor(tokens, dtype=torch.int64)
        logprobs = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), -1)
        taken = logprobs.gather(-1, ids[:, 1:, None])[..., 0].numpy()
    full = np.zeros((2, 6), np.float32)
    full[:, 1:] = taken
    return {
        "probe_length": 6,
        "probe_tokens": tokens.tobytes(),
        "probe_logprobs": full.tobytes(),
    }


ADDITION = ("worker.engine=transformers", "environment.name=addition", "worker.slots=4")
PAYLOAD = '{"prompt": "12+34=", "answer": "046"}'


@contextlib.asynccontextmanager
async def a_run(
    run_dir: Path, *settings: str, environment: str = "addition", config: str = ""
) -> AsyncIterator[tuple[ScriptedCoordinator, asyncio.subprocess.Process]]:
    """Coordinator, origin and a transformers worker that has version 1.0 installed."""
    async with ScriptedCoordinator(run_dir) as coordinator:
        await coordinator.start_origin()
        model = a_model(0)
        coordinator.environment = environment
        coordinator.assets_digest = publish_assets(run_dir, model)
        async with a_daemon(run_dir, *settings, config=config) as worker:
            await coordinator.welcome()
            coordinator.announce(V0, publish(run_dir, model), **a_probe(model))
            installed = await coordinator.installed(V0)
            assert installed.canary_diff is not None
            assert installed.canary_diff < 1e-5
            yield coordinator, worker


def test_a_model_is_fetched_checked_sampled_and_updated(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_run(tmp_path, *ADDITION) as (coordinator, worker):
            for number in range(1, 5):
                coordinator.lease(number, V0, PAYLOAD)
            newer = a_model(1)
            coordinator.announce(V1, publish(tmp_path, newer), **a_probe(newer))
            for _ in range(4):
                result = await coordinator.hear(GroupResult)
                ids = np.frombuffer(result.token_ids, np.int32)
                assert len(ids) == sum(t.length for t in result.trajectories)
                assert all(t.prompt_length == 7 for t in result.trajectories)
                coordinator.acknowledge(result)
            await coordinator.installed(V1)

            wrong = a_probe(a_model(2))
            other = a_model(3)
            coordinator.announce(V2, publish(tmp_path, other), **wrong)
            failed = await coordinator.hear(InstallFailed)
            assert (failed.version, failed.stage, failed.serving) == (V2, "canary", V1)
            coordinator.lease(5, V1, PAYLOAD)
            result = await coordinator.hear(GroupResult)
            assert {s.version for t in result.trajectories for s in t.spans} == {V1}
            coordinator.acknowledge(result)
            worker.send_signal(signal.SIGTERM)
            await coordinator.hear(Goodbye)
            assert await worker.wait() == 0

    run(scenario())


def children_of(pid: int, module: str) -> list[int]:
    """Process ids of the daemon's children that run `module`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_text()
            command = (entry / "cmdline").read_bytes()
            if int(stat.rpartition(")")[2].split()[1]) == pid and module.encode() in command:
                found.append(int(entry.name))
    return found


def publish_adapter(run_dir: Path, model: Any, seed: int) -> tuple[str, Any]:
    """Write an adapter of rank 2 onto the model's queries; its digest, and the model with it."""
    base = publish(run_dir, model)
    adapted = copy.deepcopy(model)
    torch.manual_seed(seed)
    pairs = []
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj"
        a, b = torch.randn(2, 32), torch.randn(32, 2)
        pairs += [(name + LORA_A, a), (name + LORA_B, b)]
        with torch.no_grad():
            adapted.get_submodule(name).weight += 0.5 * (b @ a)
    manifest = write_version(
        run_dir / "versions",
        ((name, "F32", tuple(t.shape), t.numpy().tobytes()) for name, t in pairs),
        kind="adapter",
        metadata=AdapterBase(base, 0.5).metadata(),
    )
    return manifest.manifest_digest, adapted


def test_an_adapter_comes_with_its_base_once_and_serves_on_top_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_run(tmp_path, *ADDITION) as (coordinator, _):
            store = tmp_path / "workers" / "w-1" / "store"
            beneath = a_model(7)
            for step, seed in ((1, 1), (2, 2)):
                digest, adapted = publish_adapter(tmp_path, beneath, seed)
                version = Version(1, step)
                coordinator.announce(version, digest, **a_probe(adapted))
                installed = await coordinator.installed(version)
                assert installed.canary_diff is not None
                assert installed.canary_diff < 1e-5
            base = publish(tmp_path, beneath)
            assert (store / f"{base}.bin").is_file(), "what needs it is installed"
            coordinator.lease(1, version, PAYLOAD)
            result = await coordinator.hear(GroupResult)
            assert {s.version for t in result.trajectories for s in t.spans} == {version}
            coordinator.acknowledge(result)

    run(scenario())


def publish_delta(run_dir: Path, before: str, after: str) -> str:
    """Write what makes one version of the other; its manifest's digest."""
    folder = run_dir / "versions"
    base, target = open_version(folder, before), open_version(folder, after)
    assert base is not None
    assert target is not None
    with base, target:
        manifest = write_delta(folder, base, target, share_max=2.0)
    assert manifest is not None
    return manifest.manifest_digest


def test_deltas_lead_to_a_version_and_what_fails_is_followed_by_the_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_run(tmp_path, *ADDITION) as (coordinator, _):
            models = [a_model(seed) for seed in range(4)]
            digests = [publish(tmp_path, model) for model in models]
            chain = tuple(publish_delta(tmp_path, *digests[at : at + 2]) for at in range(3))
            store = tmp_path / "workers" / "w-1" / "store"

            async def install(step: int, model: int, path: tuple[str, ...]) -> None:
                version = Version(1, step)
                probe = a_probe(models[model])
                coordinator.announce(version, digests[model], path=path, **probe)
                installed = await coordinator.installed(version)
                assert installed.manifest_digest == digests[model]
                assert installed.canary_diff is not None
                assert installed.canary_diff < 1e-5

            await install(1, 2, chain[:2])  # version 1.0 is models[0], as `a_run` made it
            assert not (tmp_path / "workers" / "w-1" / "store" / f"{digests[1]}.partial").exists()
            assert (store / f"{chain[1]}.bin").is_file(), "others may ask for it"
            await install(2, 3, (chain[0], chain[2]))  # the first leads to another base
            await install(3, 1, ("e" * 64,))  # a delta that nobody has

    run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_an_engine_that_is_killed_comes_back_with_its_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_run(tmp_path, *ADDITION) as (coordinator, worker):
            (engine,) = children_of(worker.pid, "echo2_workers.engine_host")
            os.kill(engine, signal.SIGKILL)
            hello = await coordinator.welcome()
            assert hello.installed is None
            await coordinator.installed(V0)
            coordinator.lease(1, V0, PAYLOAD)
            coordinator.acknowledge(await coordinator.hear(GroupResult))

    run(scenario())


UNRULY = """
import asyncio, json, os, time
from echo2_workers.environment import RolloutBuilder

class Unruly:
    name = "unruly"
    version = "7"
    def __init__(self, *, greeting):
        self.greeting = greeting
    def num_tasks(self, split):
        return None
    def task(self, split, index):
        return "{}"
    async def rollout(self, task, generate):
        what = json.loads(task.payload)["what"]
        rollout = RolloutBuilder([1, 3])
        rollout.add_completion(await generate(rollout.token_ids))
        if what == "raise":
            raise ValueError("no reward today")
        if what == "hang":
            time.sleep(3600)
        if what == "exit":
            os._exit(3)
        if what == "sys.exit":
            raise SystemExit(4)
        if what == "wait":
            await asyncio.sleep(3600)
        if what == "deaf":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    pass
        return rollout.finish(1.0)
"""


def test_unruly_environments_cost_their_own_group_only(tmp_path: Path) -> None:
    (tmp_path / "my_unruly.py").write_text(UNRULY)
    settings = (
        "worker.engine=transformers",
        "worker.slots=8",
        "environment.hang_timeout_s=1.0",
        'environment.name="my_unruly:Unruly"',
    )

    async def scenario() -> None:
        async with ScriptedCoordinator(tmp_path) as coordinator:
            await coordinator.start_origin()
            model = a_model(0)
            coordinator.environment = "my_unruly:Unruly"
            coordinator.settings = '{"greeting": "hello"}'
            coordinator.assets_digest = publish_assets(tmp_path, model)
            async with a_daemon(tmp_path, *settings) as worker:
                hello = await coordinator.welcome()
                assert hello.environment_version == "7"
                coordinator.announce(V0, publish(tmp_path, model))
                await coordinator.installed(V0)

                def lease(number: int, what: str) -> None:
                    coordinator.lease(number, V0, json.dumps({"what": what}))

                async def fails(number: int) -> str:
                    failed = await coordinator.hear(
                        LeaseFailed, lambda m: m.lease == f"lease-{number}"
                    )
                    assert failed.stage == "environment"
                    return failed.text

                lease(1, "wait")  # an innocent one, played again each time
                for number, (what, said) in enumerate(
                    {
                        "raise": "ValueError: no reward today",
                        "sys.exit": "SystemExit 4",
                        "hang": "environment.hang_timeout_s",
                        "exit": "exit code 3",
                    }.items(),
                    start=2,
                ):
                    lease(number, what)
                    assert said in await fails(number)
                lease(10, "fine")
                coordinator.acknowledge(await coordinator.hear(GroupResult))
                await coordinator.hear(Heartbeat, lambda h: "lease-1" in h.lease_tokens)
                assert not any(isinstance(m, LeaseFailed) for m in coordinator.heard)
                lease(11, "deaf")
                await coordinator.hear(
                    Heartbeat, lambda h: h.lease_tokens.get(LeaseId("lease-11"), 0) > 0
                )
                coordinator.send(LeaseRevoked(lease=LeaseId("lease-11"), reason="stalled"))
                coordinator.send(LeaseRevoked(lease=LeaseId("lease-1"), reason="enough"))
                lease(12, "fine")
                coordinator.acknowledge(await coordinator.hear(GroupResult))
                worker.send_signal(signal.SIGTERM)
                await coordinator.hear(Goodbye)
                assert await worker.wait() == 0

    run(scenario())
