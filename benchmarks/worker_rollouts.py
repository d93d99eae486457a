"""What a worker's processor does for one batch of rollouts: seconds of each process.

    python benchmarks/worker_rollouts.py [--batches 30] [--groups 32] [--core 1] [--out FILE]

The worker's own parts (group player, environment process, engine process with transformers)
play batches of the quickstart's groups, one batch at a time, all on one core as a worker on
a small machine would; no coordinator and no network. Processor seconds are those of the
kernel's books, so other work on the machine changes them little; wall seconds it does.
Prints one JSON object with the medians of the batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import uvloop

from echo2.config import Config, load_config
from echo2.core.worker_events import Event, GroupDone
from echo2.messages import LeaseGranted, VersionAnnounced
from echo2.types import GroupId, LeaseId, Sampling, Task, Version
from echo2.weights.store import write_version
from echo2.weights.versions import NamedTensor
from echo2_workers.engine_process import InstallOrder
from echo2_workers.environments.addition import Addition
from echo2_workers.groups import Groups
from echo2_workers.models import model_folder
from echo2_workers.parts import make_engine, make_environments

ROOT: Final = Path(__file__).parent.parent
WARM_UP: Final = 3
VERSION: Final = Version(1, 0)
_TICKS: Final = os.sysconf("SC_CLK_TCK")


async def measure(config: Config, folder: Path, batches: int, groups: int) -> dict[str, Any]:
    model = model_folder(config.model.path)
    manifest = write_version(folder, tensors_of(model))
    arrived: asyncio.Queue[Event] = asyncio.Queue()
    environments = make_environments(config, folder=folder, import_paths=[], on_fatal=print)
    engine = make_engine(config, on_died=print)
    await environments.start(json.dumps(config.environment.settings), model)
    await engine.start(model)
    announced = VersionAnnounced(
        version=VERSION,
        manifest_digest=manifest.manifest_digest,
        num_bytes=manifest.num_bytes,
        origin="",
        origin_key="",
    )
    await engine.install(
        InstallOrder(
            announced=announced, previous=None, folder=folder, mode="continue", tolerance=1e-3
        )
    )
    player = Groups(
        environments, engine=lambda: engine, rollout_timeout_s=600.0, post=arrived.put_nowait
    )
    leases = a_lease(config)
    spent: list[dict[str, float]] = []
    for batch in range(WARM_UP + batches):
        before, began = cpu_seconds(), time.perf_counter()
        for _ in range(groups):
            player.start(next(leases))
        for _ in range(groups):
            done = await arrived.get()
            if not isinstance(done, GroupDone):
                raise RuntimeError(f"a group did not end well: {done}")
        wall_s, after = time.perf_counter() - began, cpu_seconds()
        if batch >= WARM_UP:
            spent.append({"wall": wall_s, **{k: after[k] - before.get(k, 0.0) for k in after}})
    await player.stop()
    await engine.stop()
    await environments.stop()
    return {key: round(statistics.median(s[key] for s in spent), 4) for key in spent[0]}


def tensors_of(model: Path) -> Iterator[NamedTensor]:
    """The model in float32, as a learner publishes it."""
    import torch
    from transformers import AutoModelForCausalLM

    from echo2_workers.engines.sampler import untied_state

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, tensor in untied_state(loaded).items():
        yield name, "F32", tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def a_lease(config: Config) -> Iterator[LeaseGranted]:
    environment, sampling = Addition(), config.sampling
    number = 0
    while True:
        yield LeaseGranted(
            lease=LeaseId(f"l{number}"),
            group=GroupId(f"g{number}"),
            attempt=1,
            kind="train",
            version=VERSION,
            task=Task(number, environment.task("train", number)),
            group_size=config.dispatch.group_size,
            sampling=Sampling(sampling.temperature, sampling.top_p, sampling.max_tokens),
            seed=1000 * number,
            revoke_after_s=600.0,
        )
        number += 1


def cpu_seconds() -> dict[str, float]:
    """Of this process and its children, by what they are."""
    found = {"daemon": sum(os.times()[:2])}
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except (OSError, NotADirectoryError):
            continue
        if int(stat[1]) == os.getpid():
            for name in ("engine", "environment"):
                if f"{name}_host".encode() in command:
                    found[name] = (int(stat[11]) + int(stat[12])) / _TICKS
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    os.environ["OMP_NUM_THREADS"] = "1"
    config = load_config(ROOT / "configs/quickstart.toml", [])
    with tempfile.TemporaryDirectory(prefix="worker-rollouts-") as name:
        seconds = uvloop.run(measure(config, Path(name), options.batches, options.groups))
    report = {
        "benchmark": "worker_rollouts",
        "groups": options.groups,
        "group_size": config.dispatch.group_size,
        "cores": os.cpu_count(),
        "seconds_per_batch": seconds,
        "rollouts_per_s": round(options.groups * config.dispatch.group_size / seconds["wall"]),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
