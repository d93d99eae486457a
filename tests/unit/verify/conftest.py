"""Run folders by words, for the tests of `echo2.verify`.

`a_run()` is a healthy run that did everything once: S = 2, κ = 1, R = 2, two workers. Its
first learner trained 0 to 3, checkpointed at 2 and was lost; the second resumed at 2, got
back the groups of steps 2 and 3, and trained 2 to 5, the last batch with one group. Tests
change its records and ask for the broken promises by name.
"""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from blake3 import blake3

from echo2.verify.schema import COUNT, METRICS
from echo2.weights.versions import write_version

CONFIG = """\
[model]
dtype = "float32"
[staleness]
max = 2
late = "wait"
period = 1
[dispatch]
group_size = 2
attempts_max = 3
[learner]
groups_per_step = 2
logprob_check_every_steps = 2
[audit]
share = 0.4
workers = ["w2"]
"""
AUDIT_KEY = bytes(32)

Fields = dict[str, Any]


@dataclass
class ARun:
    """The records of a run: change them, then `write` them."""

    events: list[Fields] = field(default_factory=list)
    metrics: list[Fields] = field(default_factory=list)
    versions: dict[tuple[int, int], Path] = field(default_factory=dict)
    """Version -> its files, without their suffixes."""
    checkpoints: list[tuple[int, int]] = field(default_factory=lambda: [(4, 2), (6, 2)])
    """(step, incarnation) of those on the disk."""
    config: str = CONFIG
    last_bytes: dict[str, bytes] = field(default_factory=dict)
    """File name -> bytes after its last line."""

    def add(self, event: str, **fields: Any) -> Fields:
        made = {"time": 1000.0 + len(self.events), "event": event, **fields}
        self.events.append(made)
        return made

    def insert_before(self, place: Fields, event: str, **fields: Any) -> Fields:
        made = {"time": place["time"], "event": event, **fields}
        self.events.insert(self.events.index(place), made)
        return made

    def find(self, event: str, **fields: Any) -> Fields:
        """The last event of this name with these fields."""
        for line in reversed(self.events):
            if line["event"] == event and all(line.get(k) == v for k, v in fields.items()):
                return line
        raise LookupError(f"no {event} with {fields}")

    def remove(self, event: str, **fields: Any) -> None:
        self.events.remove(self.find(event, **fields))

    def line(self, step: int, incarnation: int = 2) -> Fields:
        """The line of metrics of a step."""
        return next(
            line
            for line in self.metrics
            if (line["step"], line["incarnation"]) == (step, incarnation)
        )

    def interrupt(self) -> None:
        """The run was killed: it has no last word."""
        self.remove("run_finished")

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.resolved.toml").write_text(self.config, encoding="utf-8")
        (folder / "audit.key").write_text(AUDIT_KEY.hex(), encoding="ascii")
        for name, lines in (("events", self.events), ("metrics", self.metrics)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            more = self.last_bytes.get(name, b"")
            (folder / f"{name}.jsonl").write_bytes(text.encode() + more)
        (folder / "versions").mkdir()
        for path in self.versions.values():
            for suffix in (".bin", ".manifest"):
                copyfile(f"{path}{suffix}", folder / "versions" / (path.name + suffix))
        for step, incarnation in self.checkpoints:
            _write_checkpoint(folder / "checkpoints" / f"step-{step:08d}-i{incarnation}", step)
        return folder


def _write_checkpoint(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    content = len(header).to_bytes(8, "little") + header + b"abcd"
    (folder / "policy.safetensors").write_bytes(content)
    files = {"policy.safetensors": [len(content), blake3(content).hexdigest()]}
    state = {"format": 1, "state": {"step": step}, "files": files, "rng": {}}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")


def a_run(folder: Path) -> ARun:
    """The healthy run; its versions are written to `folder`."""
    run = ARun()
    make = _Maker(run, folder)
    run.add(
        "run_started",
        run_id="r1",
        staleness_max=2,
        groups_per_step=2,
        group_size=2,
        late="wait",
        period=1,
    )
    for worker in ("w1", "w2"):
        run.add("worker_joined", worker=worker, engine="transformers", precision="float32", slots=4)
    run.add("learner_joined", incarnation=1, resume_step=0, digest="")
    make.publish(1, 0)
    run.add("worker_ready", worker="w1")
    run.add(
        "lease_revoked",
        group_id="g0",
        lease="l0",
        worker="w2",
        reason="silent for 15 s",
        held_s=15.0,
    )
    run.add(
        "lease_failed",
        group_id="g1",
        lease="l1",
        worker="w2",
        stage="engine",
        reason="died",
        held_s=1.0,
    )
    make.end("g90", "failed", reason="3 attempts, the last: the environment raised")
    make.batch(1, 0, g0=(1, 0), g1=(1, 0))
    make.publish(1, 1)
    make.batch(1, 1, g2=(1, 0), g3=(1, 1))
    make.publish(1, 2)
    run.add("checkpoint_saved", incarnation=1, step=2, kept=[2])
    make.batch(1, 2, g4=(1, 1), g5=(1, 2))
    make.publish(1, 3)
    make.batch(1, 3, g6=(1, 2), g7=(1, 3))
    run.add("learner_left", incarnation=1, reason="silent for 15 s", held_s=15.0)
    run.add("learner_joined", incarnation=2, resume_step=2, digest="")
    for group, place in (("g4", "buffer"), ("g5", "buffer"), ("g6", "queue"), ("g7", "queue")):
        run.add("group_returned", group_id=group, incarnation=2, reason="resumed at 2", to=place)
    make.publish(2, 2)
    make.batch(2, 2, g4=(1, 1), g5=(1, 2))
    make.publish(2, 3)
    make.batch(2, 3, g6=(2, 2), g7=(2, 3))
    run.add("checkpoint_saved", incarnation=2, step=4, kept=[2, 4])
    make.publish(2, 4)
    make.batch(2, 4, g8=(2, 2), g9=(2, 4))
    make.publish(2, 5)
    make.batch(2, 5, g10=(2, 5))
    make.publish(2, 6)
    run.add("checkpoint_saved", incarnation=2, step=6, kept=[4, 6])
    run.add(
        "eval_ended",
        eval_id="e6",
        incarnation=2,
        step=6,
        num_asked=4,
        num_done=4,
        reward_mean=0.75,
        reason="",
    )
    run.line(6).update(eval_version=6, eval_reward=0.75)
    run.add(
        "lease_revoked",
        group_id="g11",
        lease="l11",
        worker="w1",
        reason="the run is over",
        held_s=0.5,
    )
    make.end("g11", "cancelled", reason="the run is over")
    run.add("run_finished", reason="all 6 steps are done", finished=True)
    return run


class _Maker:
    def __init__(self, run: ARun, folder: Path) -> None:
        self.run = run
        self.folder = folder
        self.incarnation = 1

    def publish(self, incarnation: int, step: int) -> None:
        """Published, and installed by both workers."""
        self.incarnation = incarnation
        content = f"weights of {incarnation}.{step} ".encode() * 20
        manifest = write_version(
            self.folder, [("w", "U8", (len(content),), content)], chunk_bytes=64
        )
        self.run.versions[incarnation, step] = self.folder / manifest.manifest_digest
        version = {
            "incarnation": incarnation,
            "step": step,
            "manifest_digest": manifest.manifest_digest,
        }
        self.run.add("version_published", **version, num_bytes=len(content))
        for worker in ("w1", "w2"):
            self.run.add(
                "version_installed",
                worker=worker,
                **version,
                fetch_s=0.1,
                install_s=0.1,
                pause_s=0.0,
                canary_diff=2e-6,
            )

    def audits(self, group: str) -> None:
        """w2 confirms what w1 sampled, where it is chosen."""
        digest = hashlib.blake2b(f"r1:{group}".encode(), key=AUDIT_KEY, digest_size=8).digest()
        if int.from_bytes(digest, "big") >= 0.4 * 2**64:
            return
        told = {"group_id": group, "lease": f"l-{group}", "worker": "w1"}
        self.run.add("audit_opened", **told)
        self.run.add(
            "group_audited",
            **told,
            auditor="w2",
            verdict="confirmed",
            reason="",
            reward_diff_max=0.0,
            claimed=[],
            recomputed=[],
        )

    def end(self, group: str, end: str, *, reason: str = "", **fields: Any) -> None:
        line = {
            "group_id": group,
            "end": end,
            "reason": reason,
            "worker": None,
            "incarnation": self.incarnation,
            "min_version": None,
            "max_version": None,
            "min_incarnation": None,
            "max_incarnation": None,
            "trained_at": None,
            "tokens": 0,
            "reward_mean": None,
            "attempts": 1,
        }
        self.run.add("group_ended", **{**line, **fields})

    def batch(self, incarnation: int, step: int, **groups: tuple[int, int]) -> None:
        """Groups by the version that sampled them, trained at `step`."""
        for group, (sampled_incarnation, sampled_step) in groups.items():
            self.audits(group)
            self.end(
                group,
                "trained",
                worker="w1",
                incarnation=incarnation,
                min_version=sampled_step,
                max_version=sampled_step,
                min_incarnation=sampled_incarnation,
                max_incarnation=sampled_incarnation,
                trained_at=step,
                tokens=400,
                reward_mean=0.5,
            )
        self.run.add("step_completed", incarnation=incarnation, step=step, num_groups=len(groups))
        zeros = dict.fromkeys(METRICS, 0.0)
        counts = {name: 0 for name, kind in METRICS.items() if kind is COUNT}
        nulls = dict.fromkeys(("eval_reward", "eval_version"))
        line = {
            "step": step + 1,
            "incarnation": incarnation,
            "policy_version": step,
            "reward_mean": 0.5,
            "groups_trained": len(groups),
            "staleness_max": max(step - sampled for _, sampled in groups.values()),
            "tokens": 1000,
            "logprob_diff_mean": 3e-7 if step % 2 else None,
            "logprob_diff_tokens": 1200 if step % 2 else 0,
        }
        self.run.metrics.append({**zeros, **counts, **nulls, **line})


@pytest.fixture(scope="session")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> ARun:
    return a_run(tmp_path_factory.mktemp("versions"))


@pytest.fixture
def run(healthy_run: ARun) -> ARun:
    return deepcopy(healthy_run)
