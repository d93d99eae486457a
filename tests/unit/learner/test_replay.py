"""Batches that were trained are kept, bounded, and a replay of them computes the same."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from structlog.testing import capture_logs

from echo2.commands import rollouts as command
from echo2.config import RolloutsTable
from echo2.errors import ConfigError, Echo2Error, LearnerError
from echo2_learner import replay, rollout_files
from echo2_learner.main import run
from echo2_learner.parts import build
from echo2_learner.policy import Policy
from echo2_learner.rollout_files import RolloutFiles, read_saved_batch, saved_steps
from echo2_learner.stop import StopSignal

EXACT = ("loss", "grad_norm", "entropy", "mismatch_kl", "ess", "clip_fraction", "tokens",
         "reward_mean", "learning_rate", "staleness_mean", "staleness_max", "groups_trained",
         "step", "policy_version")  # fmt: skip
LEARNER = {"steps": 6, "updates_per_step": 2, "schedule": "linear"}


def train(
    fake: ModuleType, model: Path, run_dir: Path, *, resume: bool = False, **tables: Any
) -> Any:
    config = fake.make_config(
        model,
        **{"learner": LEARNER, "eval": {"every_steps": 0}, "staleness": {"period": 2}, **tables},
    )
    with StopSignal() as stop:
        parts = build(config, run_dir, resume=resume)
        session = fake.FakeSession(config, run_dir, Policy.load(model), incarnation=1 + resume)
        assert run(parts, session, stop, again="") == 0
    return config


def replayed(config: Any, source: Path, target: Path) -> list[dict[str, Any]]:
    with StopSignal() as stop:
        parts, session = replay.prepare(replay.replay_config(config), source, target)
        assert run(parts, session, stop, again="") == 0
    return lines(target)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(replayed: dict[str, Any], trained: dict[str, Any]) -> bool:
    return all(replayed[name] == trained[name] for name in EXACT)


@pytest.fixture(scope="module")
def trained(
    fake: ModuleType, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """(configuration, run folder) of a run of 6 steps; the rollouts of all are kept."""
    folder = tmp_path_factory.mktemp("trained")
    origin = {"endpoint": "tcp://127.0.0.1:5555", "public_key": "k" * 40, "pid": 1}
    (folder / "origin.json").write_text(json.dumps(origin))
    return train(fake, tiny_folder, folder), folder


def test_a_replay_from_the_same_weights_is_the_run_bit_by_bit(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    config, source = trained
    assert list(saved_steps(source / "rollouts")) == [1, 2, 3, 4, 5, 6]
    found = replayed(config, source, tmp_path / "replay")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert all(same(*pair) for pair in zip(found, lines(source), strict=True))
    expected = load_file(source / "final" / "model.safetensors")
    actual = load_file(tmp_path / "replay" / "final" / "model.safetensors")
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert not (tmp_path / "replay" / "versions").exists()
    assert not (tmp_path / "replay" / "rollouts").exists()


def test_a_replay_without_the_first_steps_begins_at_a_checkpoint(
    fake: ModuleType, tiny_folder: Path, run_dir: Path, tmp_path: Path
) -> None:
    config = train(
        fake,
        tiny_folder,
        run_dir,
        rollouts={"keep_steps": 3},
        checkpoint={"every_steps": 2, "keep": 9},
    )
    assert list(saved_steps(run_dir / "rollouts")) == [4, 5, 6]
    found = replayed(config, run_dir, tmp_path / "replay")
    assert [line["step"] for line in found] == [5, 6]
    assert all(same(*pair) for pair in zip(found, lines(run_dir)[4:], strict=True))
    for path in (run_dir / "checkpoints").glob("step-0000000[45]-*"):
        (path / "state.json").unlink()
    with pytest.raises(ConfigError, match="begin at step 4, and no checkpoint leads there"):
        replay.prepare(replay.replay_config(config), run_dir, tmp_path / "other")


def test_a_step_that_was_not_saved_ends_the_replay_before_it(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    config, trained_in = trained
    source = tmp_path / "source"
    (source / "rollouts").mkdir(parents=True)
    for step, path in saved_steps(trained_in / "rollouts").items():
        if step != 3:
            (source / "rollouts" / path.name).symlink_to(path)
    with capture_logs() as logs:
        found = replayed(config, source, tmp_path / "replay")
    assert [line["step"] for line in found] == [1, 2]
    assert (
        "step 3 was not saved"
        in next(e for e in logs if e["event"] == "replay_cut_short")["reason"]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config, source: (config, source, source), "give another --run-dir"),
        (lambda config, source: (config, source / "none", source / "x"), "holds no saved rollouts"),
    ],
)
def test_a_replay_that_cannot_be_done_says_why(
    trained: tuple[Any, Path], change: Callable[..., Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        replay.prepare(*change(*trained))


def test_a_resumed_run_forgets_the_rollouts_of_its_dead_line(
    fake: ModuleType, tiny_folder: Path, run_dir: Path
) -> None:
    train(fake, tiny_folder, run_dir, learner={"steps": 4})
    folder = run_dir / "rollouts"
    (folder / "step-00000009.safetensors").write_bytes(b"of a dead line")
    train(fake, tiny_folder, run_dir, resume=True, learner={"steps": 5})
    assert list(saved_steps(folder)) == [1, 2, 3, 4, 5]
    assert read_saved_batch(folder / "step-00000005.safetensors").incarnation == 2


# -------------------------------------------------------------------------------- the files


def saved(folder: Path, a_batch: Any, a_group: Any, granted: Any, fake: Any, **table: Any) -> Any:
    """A writer of batches by step; group g1 of worker w-1 and g2 of w-2."""
    files = RolloutFiles(folder, RolloutsTable(**{"keep_steps": 3, **table}))

    def save(step: int, *, with_own: bool = False) -> None:
        groups = [
            a_group(name="g1", step=step, versions=[(1, step)], rewards=(0.0, 1.0)),
            a_group(name="g2", step=step, versions=[(1, step - 1), (1, step)], worker="w-2",
                    rewards=(0.5, 0.5), lengths=[9, 5], seed=2),
        ]  # fmt: skip
        batch = a_batch(groups, step=step)
        handed = granted(groups, step=step)
        handed.granted = fake.BatchGranted(
            incarnation=1, step=step, loss_from_step=0, groups=("g1", "g2"), last=False
        )
        starts = [(batch.groups[0][1], np.full(7, -1.0, np.float32))] if with_own else []
        mismatch = {"w-2": 0.25}
        files.save(
            handed, batch, incarnation=1, run_id="r", mismatch=mismatch, start_logprobs=starts
        )

    return save


@pytest.fixture
def save(tmp_path: Path, a_batch: Any, a_group: Any, granted: Any, fake: Any) -> Any:
    return saved(tmp_path, a_batch, a_group, granted, fake)


def test_a_saved_batch_is_read_back_as_it_was(tmp_path: Path, save: Any) -> None:
    save(4, with_own=True)
    path = tmp_path / "rollouts" / "step-00000005.safetensors"
    batch = read_saved_batch(path)
    assert (batch.step, batch.granted.step, batch.mismatch) == (5, 4, {"w-2": 0.25})
    assert [group.group for group in batch.groups] == ["g1", "g2"]
    assert [header.length for header in batch.groups[1].trajectories] == [9, 5]
    assert batch.bounds() == [(0, 7), (7, 14), (14, 23), (23, 28)]
    arrays = load_arrays(path)  # any library of the format reads it
    assert arrays["rewards"].tolist() == [0.0, 1.0, 0.5, 0.5]
    assert arrays["advantages"][:2] == pytest.approx([-1.0, 1.0], abs=1e-3)
    assert arrays["learner_logprobs"][10:14].tolist() == [-1.0] * 4
    assert np.isnan(arrays["learner_logprobs"]).sum() == 24


def test_the_newest_steps_are_kept_within_the_bytes(
    tmp_path: Path, a_batch: Any, a_group: Any, granted: Any, fake: Any
) -> None:
    save = saved(tmp_path, a_batch, a_group, granted, fake)
    for step in range(3, 9):
        save(step)
    assert list(saved_steps(tmp_path / "rollouts")) == [7, 8, 9]
    size = saved_steps(tmp_path / "rollouts")[9].stat().st_size
    save = saved(tmp_path, a_batch, a_group, granted, fake, bytes_max=size + 10)
    save(9)
    assert list(saved_steps(tmp_path / "rollouts")) == [10]
    off = tmp_path / "off"
    saved(off, a_batch, a_group, granted, fake, keep_steps=0)(9)
    assert not off.exists()


def test_a_full_disk_is_one_warning_and_costs_nothing_else(
    tmp_path: Path, save: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with capture_logs() as logs:
        monkeypatch.setattr(rollout_files.os, "replace", full)
        save(3)
        save(4)
        monkeypatch.undo()
        save(5)
        monkeypatch.setattr(rollout_files.os, "replace", full)
        save(6)
    assert [entry["step"] for entry in logs if entry["event"] == "rollouts_not_saved"] == [4, 7]
    assert "No space left" in logs[0]["reason"]
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == [
        "step-00000006.safetensors"
    ]


def test_a_torn_file_is_told(tmp_path: Path, save: Any) -> None:
    save(3)
    path = tmp_path / "rollouts" / "step-00000004.safetensors"
    content = path.read_bytes()
    for torn in (content[:-20], content[:4], content.replace(b'"format": 1', b'"format": 7')):
        path.write_bytes(torn)
        with pytest.raises(LearnerError, match=r"step-00000004"):
            read_saved_batch(path)


# ------------------------------------------------------------------------------ the command


def test_the_command_shows_text_reward_versions_staleness_and_mismatch(
    trained: tuple[Any, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = trained
    options = {"step": None, "order": "batch", "limit": 100, "as_json": True}
    assert command.main(folder, **options) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["groups"], told["note"]) == (6, 4, "")
    assert told["kept_steps"] == [1, 2, 3, 4, 5, 6]
    assert len(told["trajectories"]) == 16
    shown = told["trajectories"][0]
    [given, sampled] = shown["parts"]
    assert given[0] is False
    assert given[1].startswith("<bos>01")
    assert sampled[0] is True
    assert (shown["versions"], shown["staleness"], shown["tokens_in_loss"]) == (["1.4"], 1, 3)
    assert {each["mismatch_tokens"] for each in told["trajectories"]} == {3}
    assert min(each["mismatch"] for each in told["trajectories"]) > 1e-3  # of staleness 1
    command.main(folder, **{**options, "step": 1})
    first = json.loads(capsys.readouterr().out)["trajectories"]
    assert max(each["mismatch"] for each in first) < 1e-4  # on-policy: rounding alone
    command.main(folder, **{**options, "order": "worst", "limit": 1, "as_json": False, "step": 2})
    text = capsys.readouterr().out
    assert "step 2 of" in text
    assert "reward 0 " in text
    assert "15 more: --limit 16" in text
    with pytest.raises(Echo2Error, match="step 7 are not kept; kept are 1 to 6"):
        command.main(folder, **{**options, "step": 7})


def test_a_run_without_rollouts_or_tokenizer_says_so(
    tmp_path: Path, save: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"step": None, "order": "best", "limit": 1, "as_json": False}
    with pytest.raises(Echo2Error, match="holds no rollouts"):
        command.main(tmp_path / "none", **options)
    save(3, with_own=True)
    assert command.main(tmp_path, **options) == 0
    text = capsys.readouterr().out
    assert "tokens are shown by id" in text
    assert "g1 #1  reward 1 " in text
    command.main(tmp_path, **{**options, "as_json": True, "limit": 4})
    [best, *others] = json.loads(capsys.readouterr().out)["trajectories"]
    assert best["mismatch_tokens"] == 4
    assert {other["worker"]: other["mismatch"] for other in others} == {"w-1": None, "w-2": 0.25}
