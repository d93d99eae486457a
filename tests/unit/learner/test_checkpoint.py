"""Resuming is bit-exact, a torn checkpoint is passed over, and only the owner writes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor

import echo2_learner
from echo2.config import LearnerTable
from echo2.errors import FencedError, LearnerError
from echo2.messages import BatchGroup
from echo2_learner.batch import TrainingBatch
from echo2_learner.checkpoint import CheckpointState, CheckpointStore, read_checkpoint
from echo2_learner.policy import Policy
from echo2_learner.rank_parts import seed_all
from echo2_learner.trainer import Trainer

Group = Callable[..., BatchGroup]
Batch = Callable[..., TrainingBatch]

TABLE = LearnerTable.model_validate(
    {
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "steps": 12,
        "warmup_steps": 2,
        "weight_decay": 0.01,
        "updates_per_step": 2,
    }
)


def state(step: int, incarnation: int = 1) -> CheckpointState:
    return CheckpointState(
        step=step,
        incarnation=incarnation,
        run_id="r",
        starts=((1, 0),),
        next_task_index=step * 4,
        groups_trained=step * 4,
    )


@pytest.fixture
def store(run_dir: Path) -> CheckpointStore:
    made = CheckpointStore(run_dir, keep=2)
    made.claim(1)
    return made


@pytest.fixture
def trainer(tiny: Policy) -> Trainer:
    return Trainer(tiny, TABLE, temperature=1.0)


def everything(policy: Policy, trainer: Trainer) -> dict[str, Tensor]:
    return {**policy.tensors(), **trainer.optimizer_tensors()}


def test_ten_steps_are_five_a_restart_and_five_bit_by_bit(
    tiny_folder: Path, run_dir: Path, a_group: Group, a_batch: Batch
) -> None:
    """Weights, moments, and the random states that data or dropout would use."""

    def steps(policy: Policy, trainer: Trainer, start: int, end: int) -> None:
        for step in range(start, end):
            # The batch depends on all random states, as if they chose the data.
            seed = int(torch.randint(1000, ())) + random.randrange(1000) + np.random.randint(1000)
            groups = [
                a_group(
                    name=f"g{i}", rewards=(1, 0, 0), seed=seed + i, step=step, versions=((1, step),)
                )
                for i in range(4)
            ]
            trainer.step(a_batch(groups, step=step))

    seed_all(3)
    straight = Policy.load(tiny_folder)
    trainer = Trainer(straight, TABLE, temperature=1.0)
    steps(straight, trainer, 0, 10)
    expected = {k: v.clone() for k, v in everything(straight, trainer).items()}

    seed_all(3)
    first = Policy.load(tiny_folder)
    first_trainer = Trainer(first, TABLE, temperature=1.0)
    steps(first, first_trainer, 0, 5)
    store = CheckpointStore(run_dir, keep=2)
    store.claim(1)
    assert store.save(state(5), first, first_trainer) == [5]

    seed_all(99)
    second = Policy.load(tiny_folder)
    second_trainer = Trainer(second, TABLE, temperature=1.0)
    found = CheckpointStore(run_dir, keep=2).newest()
    assert found is not None
    assert found.state == state(5)
    found.restore(second, second_trainer)
    steps(second, second_trainer, 5, 10)
    actual = everything(second, second_trainer)
    assert actual.keys() == expected.keys()
    assert len(actual) > 3 * len(second.tensors())
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_the_newest_are_kept(store: CheckpointStore, tiny: Policy, trainer: Trainer) -> None:
    kept = [store.save(state(step), tiny, trainer) for step in (2, 4, 6)]
    assert kept == [[2], [2, 4], [4, 6]]
    assert store.complete_steps(5) == [4]
    assert store.complete_steps(6) == [4, 6]
    newest = store.newest()
    assert newest is not None
    assert newest.state.step == 6
    assert len(newest.digest) == 64
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "step-00000004-i1",
        "step-00000006-i1",
    ]


@pytest.mark.parametrize("damage", ["state", "missing", "short", "flipped", "format"])
def test_a_torn_checkpoint_is_passed_over_with_a_message(
    damage: str, store: CheckpointStore, tiny: Policy, trainer: Trainer
) -> None:
    store.save(state(2), tiny, trainer)
    store.save(state(4), tiny, trainer)
    folder = store.folder / "step-00000004-i1"
    file = folder / "policy.safetensors"
    content = bytearray(file.read_bytes())
    match damage:
        case "state":
            text = (folder / "state.json").read_text()
            (folder / "state.json").write_text(text[: len(text) // 2])
        case "missing":
            (folder / "optimizer.safetensors").unlink()
        case "short":
            file.write_bytes(content[:-1])
        case "flipped":
            content[-1] ^= 1
            file.write_bytes(content)
        case "format":
            (folder / "state.json").write_text(json.dumps({"format": 99}))
    with structlog.testing.capture_logs() as logs:
        newest = store.newest()
    assert newest is not None
    assert newest.state.step == 2
    [skipped] = [line for line in logs if line["event"] == "checkpoint_skipped"]
    assert "step-00000004-i1" in skipped["folder"]
    assert skipped["reason"]
    # The only complete one stays when the next is written; the torn one goes.
    assert store.save(state(3), tiny, trainer) == [2, 3]
    assert not folder.exists()


def test_without_any_checkpoint_there_is_none(run_dir: Path) -> None:
    store = CheckpointStore(run_dir, keep=1)
    assert store.newest() is None
    assert not store.exists()


def test_what_lies_above_was_written_before_the_run_was_set_back(
    store: CheckpointStore, tiny: Policy, trainer: Trainer
) -> None:
    for step in (2, 4):
        store.save(state(step), tiny, trainer)
    store.claim(2)
    assert store.save(state(3, incarnation=2), tiny, trainer) == [2, 3]
    newest = store.newest()
    assert newest is not None
    assert (newest.state.step, newest.state.incarnation) == (3, 2)


def test_a_write_that_fails_leaves_the_checkpoint_before_as_it_was(
    store: CheckpointStore, tiny: Policy, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(state(2), tiny, trainer)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("echo2_learner.checkpoint._sync", full)
    with pytest.raises(LearnerError, match=r"step 4 could not be written.*No space left"):
        store.save(state(4), tiny, trainer)
    assert [path.name for path in store.folder.iterdir()] == ["step-00000002-i1"]
    read_checkpoint(store.folder / "step-00000002-i1")


def test_a_learner_that_was_taken_over_writes_no_checkpoint(
    store: CheckpointStore, run_dir: Path, tiny: Policy, trainer: Trainer
) -> None:
    store.save(state(2), tiny, trainer)
    CheckpointStore(run_dir, keep=2).claim(2)
    with pytest.raises(FencedError, match=r"incarnation 2 .* took over"):
        store.save(state(4), tiny, trainer)
    newest = store.newest()
    assert newest is not None
    assert newest.state.step == 2


def test_without_its_claim_a_learner_does_not_write(
    store: CheckpointStore, run_dir: Path, tiny: Policy, trainer: Trainer
) -> None:
    (run_dir / "learner.json").unlink()
    with pytest.raises(LearnerError, match=r"learner\.json cannot be read any more"):
        store.save(state(2), tiny, trainer)


def test_a_checkpoint_of_another_model_is_refused(
    store: CheckpointStore, tiny: Policy, trainer: Trainer
) -> None:
    store.save(state(2), tiny, trainer)
    newest = store.newest()
    assert newest is not None
    with torch.no_grad():
        tiny.module.model.norm.weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(LearnerError, match="of another model"):
        newest.restore(tiny, trainer)


def test_nothing_in_the_learner_can_unpickle() -> None:
    for path in Path(echo2_learner.__file__).parent.glob("*.py"):
        assert not re.search(r"\b(import pickle|torch\.load|np\.load|joblib)\b", path.read_text())
