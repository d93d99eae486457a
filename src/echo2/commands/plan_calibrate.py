"""`echo2 plan --calibrate`: a minute of the user's own model, engine and link, instead of a run.

    learner and origin up, version 0 published
    engines up (workers.local of them, or one), version 0 installed
    warm-up: a group in each slot
    rounds: the engines sample R groups in all their slots, while the learner trains on those before
            and publishes; then the version is fetched over the link, and installed

That is the rhythm of a run whose workers share the learner's machine, so what they take from each
other is in the figures. Where `workers.local` is 0 the workers are elsewhere: one engine samples
alone for `seconds`, and then the learner trains alone. What comes out has the form of what a run
has measured (`plan_measured`).
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from echo2.commands.extras import need_extras
from echo2.commands.origin_process import answers, end_origin, ensure_origin
from echo2.commands.plan_measured import (
    MEDIAN_ERROR,
    SPREAD_MIN,
    Measured,
    relative_errors,
)
from echo2.commands.run_folder import RunFolder
from echo2.config import Config
from echo2.config_offers import OfferTable
from echo2.config_vllm import precision_of
from echo2.errors import ConfigError, EngineError
from echo2.logs import setup_logging
from echo2.messages import BatchGroup, VersionAnnounced
from echo2.net.keys import AllowList, load_or_create_key
from echo2.net.relay import Relay
from echo2.net.sockets import close_context, make_context
from echo2.types import GroupId
from echo2.weights.store import ChunkStore

if TYPE_CHECKING:
    from echo2_learner.calibrating import BusyLearner, StepTimes
    from echo2_workers.calibrating import BusyWorker

STORE_BYTES: Final = 64 << 20
"""Kept of what came over the link, at least; twice a large version."""
STEPS_MAX: Final = 500
"""Learner steps at most; the first, in which memory is allocated, is not timed."""
STEPS_MIN: Final = 3
"""Timed in any case, however long they take."""
WINDOWS: Final = 5
"""Parts of the time, whose rates tell how sure the mean is, where the engine samples alone."""
TIMEOUT_S: Final = 1800.0
"""Nothing here is waited for longer."""
END_S: Final = 10.0
"""For the origin to end."""
LINK: Final = "calibration"


@dataclass(slots=True)
class Times:
    """What was timed: `rates` in tokens/s of one worker with all slots busy, `groups` the tokens of
    each group then, pauses in seconds, bytes that travelled with the seconds that they took."""

    steps: list[StepTimes] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    fetches: list[tuple[int, float]] = field(default_factory=list)


def calibrate(path: Path, config: Config, overrides: Sequence[str], *, seconds: float) -> Measured:
    """Measures for at least `seconds` after the warm-up. ConfigError for what cannot be measured
    here; what a part of worker or learner raises when it does not come up."""
    if config.worker.engine == "none":
        raise ConfigError(
            'worker.engine is "none", which samples nothing: --calibrate measures an engine that '
            'does, "transformers", "vllm" or "null"',
            source=str(path),
        )
    if config.learner.ranks > 1:
        raise ConfigError(
            f"learner.ranks is {config.learner.ranks}, and --calibrate times one learner process; "
            "give plan.train_s yourself, or add --set learner.ranks=1",
            source=str(path),
        )
    need_extras("learner")
    need_extras("worker")
    setup_logging("warning", config.log.format)
    environments = import_module("echo2_workers.environment")
    import_paths = [path.absolute().parent, Path.cwd()]
    environments.add_import_paths(*import_paths)
    with tempfile.TemporaryDirectory(prefix="echo2-calibrate-", ignore_cleanup_errors=True) as name:
        folder = RunFolder(Path(name) / "run")
        folder.make()
        keys = load_or_create_key(Path(name) / "link.key")
        AllowList(folder.path / "keys" / "authorized").authorize(LINK, keys.public)
        settings = [word for override in overrides for word in ("--set", override)]
        settings += ["--set", 'net.keys_dir=""']  # the link's key is in this folder
        arguments = [str(path), "--run-dir", str(folder.path), *settings]
        # The origin is in a session of its own, so it would outlive this process.
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            ensure_origin(folder, arguments, timeout_s=config.net.connect_timeout_s)
            uvloop = import_module("uvloop")
            times = uvloop.run(_measure(config, folder.path, import_paths, seconds))
        finally:
            _end_origin(folder)
            signal.signal(signal.SIGTERM, before)
    return measured(config, times)


def _end_origin(folder: RunFolder) -> None:
    """Returns when it is gone, so that its folder can go too."""
    endpoint = str((folder.origin() or {}).get("endpoint", ""))
    end_origin(folder)
    deadline = time.monotonic() + END_S
    while endpoint and answers(endpoint) and time.monotonic() < deadline:
        time.sleep(0.05)


async def _measure(
    config: Config, run_dir: Path, import_paths: list[Path], seconds: float
) -> Times:
    learners = import_module("echo2_learner.calibrating")
    parts = import_module("echo2_workers.calibrating")
    learner: BusyLearner = await asyncio.to_thread(learners.BusyLearner.build, config, run_dir)
    workers: list[BusyWorker] = [
        parts.BusyWorker(
            config=config,
            folder=run_dir / "workers" / f"calibration-{number}",
            versions=run_dir / "versions",
            task_of=learner.task,
            import_paths=import_paths,
            number=number,
        )
        for number in range(max(1, config.workers.local))
    ]
    times = Times()
    try:
        for worker in workers:
            await worker.start(learner.model)
            await worker.install(_announced(learner))
        slots = config.worker.slots
        await asyncio.gather(*(_sampled(worker, slots) for worker in workers))
        together = config.workers.local > 0
        if not together:
            await _sample_alone(workers[0], times, seconds)
        await _rounds(config, learner, workers, times, run_dir, seconds, together=together)
    finally:
        for worker in workers:
            await worker.stop()
    return times


async def _sampled(worker: BusyWorker, count: int) -> float:
    """Sample so many groups; how many seconds it took."""
    began = time.perf_counter()
    worker.sample(count)
    await worker.until(lambda: worker.is_idle, deadline_s=began + TIMEOUT_S)
    if not worker.is_idle:
        raise EngineError(f"{count} groups were not sampled within {TIMEOUT_S:g} s")
    return time.perf_counter() - began


async def _sample_alone(worker: BusyWorker, times: Times, seconds: float) -> None:
    """At full slots for `seconds`, and until as many groups as there are slots have ended."""
    before = len(worker.finished)
    began = time.perf_counter()
    worker.sample()
    await asyncio.sleep(seconds)
    enough = before + worker.config.worker.slots
    await worker.until(lambda: len(worker.finished) >= enough, deadline_s=began + TIMEOUT_S)
    spent_s = time.perf_counter() - began
    await worker.rest()
    found = worker.finished[before:]
    if len(found) < 1:
        raise EngineError(f"no group was sampled within {spent_s:.0f} s")
    times.groups += [each.tokens for each in found]
    rates = [0.0] * WINDOWS
    for each in found:
        place = min(WINDOWS - 1, int((each.at_s - began) / spent_s * WINDOWS))
        rates[place] += each.tokens * WINDOWS / spent_s
    times.rates += rates


async def _rounds(
    config: Config,
    learner: BusyLearner,
    workers: Sequence[BusyWorker],
    times: Times,
    run_dir: Path,
    seconds: float,
    *,
    together: bool,
) -> None:
    """Steps on what was sampled last, `together` with the sampling of the next groups."""
    context = make_context()
    keys = load_or_create_key(run_dir.parent / "link.key") if config.net.curve else None
    store = ChunkStore(run_dir / "link", max(STORE_BYTES, 2 * learner.published.num_bytes))
    share = -(-config.learner.groups_per_step // len(workers))
    began_s = time.perf_counter()
    try:
        async with Relay(context, store, keys=keys, name=LINK) as relay:
            for number in range(STEPS_MAX):
                groups = _batch(config, learner, workers)
                counts = [len(worker.finished) for worker in workers]
                sampling = [_sampled(worker, share) for worker in workers if together]
                found, spent_s = await asyncio.gather(
                    asyncio.to_thread(learner.do_step, groups), asyncio.gather(*sampling)
                )
                if number:
                    times.steps.append(found)
                    for worker, before, took_s in zip(workers, counts, spent_s, strict=False):
                        tokens = [each.tokens for each in worker.finished[before:]]
                        times.groups += tokens
                        times.rates.append(sum(tokens) / took_s)
                await _fetch(config, relay, learner, times, is_first=not number)
                for worker in workers:
                    installed = await worker.install(_announced(learner))
                    times.pauses_s.append(installed.pause_s)
                is_long = time.perf_counter() - began_s > seconds
                if len(times.steps) >= STEPS_MIN and is_long:
                    break
    finally:
        await close_context(context)


async def _fetch(
    config: Config, relay: Relay, learner: BusyLearner, times: Times, *, is_first: bool
) -> None:
    """What travels of the newest version, unless the link is configured. The first fetch opens
    the connection, and is not counted."""
    if config.plan.origin_uplink_mbit or config.net.origin_uplink_mbit:
        return
    published = learner.published
    digest, num_bytes = published.manifest_digest, published.num_bytes
    if published.deltas:
        digest, num_bytes = published.deltas[0].manifest_digest, published.deltas[0].num_bytes
    began = time.perf_counter()
    stored = await relay.fetch(digest, published.origin, published.origin_key, timeout_s=TIMEOUT_S)
    fetch_s = time.perf_counter() - began
    stored.close()
    if not is_first:
        times.fetches.append((num_bytes, fetch_s))


def _announced(learner: BusyLearner) -> VersionAnnounced:
    published = learner.published
    return VersionAnnounced(
        version=published.version,
        manifest_digest=published.manifest_digest,
        num_bytes=published.num_bytes,
        origin=published.origin,
        origin_key=published.origin_key,
        probe_length=published.probe_length,
        probe_tokens=published.probe_tokens,
        probe_logprobs=published.probe_logprobs,
    )


def _batch(config: Config, learner: BusyLearner, workers: Sequence[BusyWorker]) -> list[BatchGroup]:
    """R groups, the newest; where fewer were sampled some stand in it more than once."""
    newest = sorted(
        (each for worker in workers for each in worker.finished), key=lambda each: -each.at_s
    )
    chosen = [newest[i % len(newest)] for i in range(config.learner.groups_per_step)]
    return [
        BatchGroup(
            incarnation=1,
            step=learner.step,
            group=GroupId(f"{each.result.group}-{place}"),
            worker=LINK,
            task=each.task,
            trajectories=each.result.trajectories,
            token_ids=each.result.token_ids,
            logprobs=each.result.logprobs,
            loss_mask=each.result.loss_mask,
        )
        for place, each in enumerate(chosen)
    ]


def measured(config: Config, times: Times) -> Measured:
    """In the form of a run's."""
    rate, mean = statistics.fmean(times.rates), statistics.fmean(times.groups)
    last = times.steps[-1]
    train = [step.train_s + step.publish_s for step in times.steps]
    deltas = [step.delta_bytes for step in times.steps if step.delta_bytes is not None]
    values: dict[str, float] = {
        "train_s": statistics.median(train),
        "encode_s": statistics.median(step.publish_s for step in times.steps),
        "tokens_per_group": mean,
        "group_tokens_cv": statistics.pstdev(times.groups) / mean,
        "version_bytes": last.num_bytes,
        "delta_share": min(1.0, statistics.median(deltas) / last.num_bytes) if deltas else 1.0,
        "install_s": statistics.median(times.pauses_s),
    }
    line: dict[str, Any] = {}
    if times.fetches:
        mbit = statistics.median(size * 8e-6 / spent for size, spent in times.fetches)
        values["origin_uplink_mbit"] = mbit
        line = {"uplink_mbit": mbit, "downlink_mbit": mbit}
    worker = config.worker
    offer = OfferTable(
        name=f"{worker.engine}-{precision_of(config)}",
        price_usd_per_h=worker.price_usd_per_h,
        tokens_per_s=rate,
        count=max(1, config.workers.local),
        slots=worker.slots,
        **line,
    )
    return Measured(
        None,
        len(times.steps),
        0.0,
        values,
        [offer],
        None,
        relative_errors(
            train=(MEDIAN_ERROR, values["train_s"], train if len(train) >= SPREAD_MIN else []),
            rate=(1.0, rate, times.rates),
        ),
    )


def calibration_text(config: Config, found: Measured) -> list[str]:
    """What was measured as tables that can be pasted, with a comment on what each is."""
    values, offer = found.values, found.offers[0]
    together = config.workers.local > 0
    told = {
        "train_s": f"median of {found.num_steps} steps with their publication",
        "encode_s": "of that the publication",
        "tokens_per_group": "mean",
        "group_tokens_cv": "",
        "version_bytes": "",
        "delta_share": "",
        "install_s": "pause of the engine",
        "origin_uplink_mbit": "over loopback; set it to that of your line",
    }
    busy = (
        f"{offer.count} engines at work beside the learner"
        if together
        else "one engine alone, then the learner alone"
    )
    lines = [f"# measured with {busy} on this machine", "[plan]"]
    for name, what in told.items():
        if name in values:
            comment = f"  # {what}" if what else ""
            lines.append(f"{name} = {_number(values[name])}{comment}")
    groups_per_s = (offer.tokens_per_s or 0.0) / values["tokens_per_group"]
    lines += [
        "",
        "[[offers]]",
        f'name = "{offer.name}"',
        f"price_usd_per_h = {_number(offer.price_usd_per_h)}",
        f"tokens_per_s = {_number(offer.tokens_per_s or 0.0)}  # {groups_per_s:.4g} groups/s",
        f"count = {offer.count}",
        f"slots = {offer.slots}",
    ]
    if "origin_uplink_mbit" in values:
        lines += [
            f"uplink_mbit = {_number(offer.uplink_mbit)}",
            f"downlink_mbit = {_number(offer.downlink_mbit)}",
        ]
    return lines


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1e4 or value == int(value) else f"{value:.4g}"
