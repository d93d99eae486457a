"""What the records of a run have measured of that which `echo2 plan` assumes.

| assumption | from |
|---|---|
| train_s | median of train_s + publish_s of the steps, in metrics.jsonl |
| encode_s | median of publish_s |
| tokens_per_group, group_tokens_cv | tokens of the groups that were trained, in events.jsonl |
| version_bytes | num_bytes of the last version_published |
| delta_share | bytes of the deltas in versions/ over those of the version, median |
| install_s | median of pause_s in version_installed |
| origin_uplink_mbit | bytes of a version, as it travelled, over the median of fetch_s |
| offers | the run's workers by engine, precision and slots; their share of the trained groups |

Of some the spread is known too, and from it the relative standard error of what is taken: of the
medians of T_train and T_bcast, and of the rate's quantile, as of a normal distribution.

A line carries at least what fetch_s shows, and so do the machines' lines of the offers that are
made here. The fleet's rate is the nine-tenths quantile of rollout_tokens_per_s for each ready
worker: with a full fleet the workers wait at times, and then sample less than they could.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo2.commands.run_folder import RunFolder
from echo2.commands.run_records import RecordTail, surviving_lines
from echo2.config import Config, load_config
from echo2.config_offers import OfferTable
from echo2.core.fleet_interval import ERROR_MAX
from echo2.errors import ConfigError, WeightsError
from echo2.weights.files import MANIFEST
from echo2.weights.snapshot import Manifest
from echo2.weights.versions import named_manifest, read_manifest_file

RATE_QUANTILE: Final = 0.9
MEDIAN_ERROR: Final = 1.25
QUANTILE_ERROR: Final = 1.71
"""Standard error of a median, and of the quantile RATE_QUANTILE, of n normal values, in their
standard deviation over √n."""
SPREAD_MIN: Final = 4
"""Records from which a spread is told."""
EVENTS: Final = frozenset(
    {
        "group_ended",
        "version_disseminated",
        "version_installed",
        "version_published",
        "worker_joined",
    }
)


@dataclass(frozen=True, slots=True)
class Measured:
    """`values` of assumptions by their names in [plan]; `offers` are the run's own workers.
    `run_dir` None: no run, but a calibration (`plan_calibrate`), which knows no bubble.
    `bcast_s` is the median T_bcast of 0.9 of the workers, None if no version was whole there.
    `errors`: relative standard errors, by the names of StandardErrors, of what was recorded at
    least SPREAD_MIN times."""

    run_dir: Path | None
    num_steps: int
    bubble_ratio: float
    values: Mapping[str, float]
    offers: list[OfferTable]
    bcast_s: float | None
    errors: Mapping[str, float]


def measure_run(run_dir: Path) -> Measured:
    """Read a run folder. ConfigError when it is none, or when no step was trained in it."""
    folder = RunFolder(run_dir)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a folder; name the folder of a run")
    if not folder.resolved_config.exists():
        raise ConfigError(
            f"{run_dir} holds no {folder.resolved_config.name}; name the folder of a run"
        )
    lines = surviving_lines(folder.metrics)
    if not lines:
        raise ConfigError(f"{folder.metrics} holds no step: wait until the run has trained some")
    lines = lines[1:] or lines  # the first loads, compiles and waits for the first version
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in RecordTail(folder.events).read():
        if event.get("event") in EVENTS:
            events[event["event"]].append(event)
    values = _of_steps(lines) | _of_groups(events["group_ended"])
    values |= _of_versions(events, folder.path / "versions")
    config = load_config(folder.resolved_config)
    rates = _rates(lines)
    offers = _offers(config, rates, events, values)
    bcasts = _numbers(events["version_disseminated"][1:], "t90_s")
    bcast_s = statistics.median(bcasts) if bcasts else None
    return Measured(
        run_dir,
        len(lines),
        statistics.fmean(_numbers(lines, "bubble_ratio") or [0.0]),
        values,
        offers,
        bcast_s,
        relative_errors(
            train=(MEDIAN_ERROR, values.get("train_s"), _step_seconds(lines)),
            rate=(QUANTILE_ERROR, _fleet_rate(rates), rates),
            bcast=(MEDIAN_ERROR, bcast_s, bcasts),
        ),
    )


def relative_errors(**samples: tuple[float, float | None, Sequence[float]]) -> dict[str, float]:
    """Relative standard errors, each from the error of a quantile, that quantile, and the sample
    that it is of."""
    found = {}
    for name, (error, taken, sample) in samples.items():
        if taken and len(sample) >= SPREAD_MIN:
            relative = error * statistics.stdev(sample) / math.sqrt(len(sample)) / taken
            found[name] = min(ERROR_MAX, relative)
    return found


def _fleet_rate(rates: Sequence[float]) -> float | None:
    if not rates:
        return None
    return sorted(rates)[round(RATE_QUANTILE * (len(rates) - 1))]


def _of_steps(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    trained = _step_seconds(lines)
    found = {}
    if trained:
        found["train_s"] = statistics.median(trained)
    published = [seconds for seconds in _numbers(lines, "publish_s") if seconds]
    if published:
        found["encode_s"] = statistics.median(published)
    return found


def _step_seconds(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    return [
        line["train_s"] + (line.get("publish_s") or 0.0)
        for line in lines
        if _is_number(line.get("train_s"))
    ]


def _rates(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Tokens per second for each ready worker, a value for each step."""
    return [
        line["rollout_tokens_per_s"] / line["workers_ready"]
        for line in lines
        if line.get("workers_ready") and line.get("rollout_tokens_per_s")
    ]


def _of_groups(ended: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    tokens = _numbers([event for event in ended if event.get("end") == "trained"], "tokens")
    if not tokens:
        return {}
    mean = statistics.fmean(tokens)
    found = {"tokens_per_group": mean}
    if len(tokens) > 1 and mean:
        found["group_tokens_cv"] = min(10.0, statistics.pstdev(tokens) / mean)
    return found


def _of_versions(
    events: Mapping[str, Sequence[Mapping[str, Any]]], versions: Path
) -> dict[str, float]:
    found: dict[str, float] = {}
    sizes = _numbers(events["version_published"], "num_bytes")
    if sizes:
        found["version_bytes"] = sizes[-1]
        deltas = [manifest.num_bytes for manifest in _deltas(versions)]
        if deltas:
            found["delta_share"] = min(1.0, statistics.median(deltas) / sizes[-1])
    later = [event for event in events["version_installed"] if event.get("step")]
    pauses, fetches = _numbers(later, "pause_s"), _numbers(later, "fetch_s")
    if pauses:
        found["install_s"] = statistics.median(pauses)
    if sizes and fetches and statistics.median(fetches) > 0:
        travelled = sizes[-1] * found.get("delta_share", 1.0)
        found["origin_uplink_mbit"] = travelled * 8e-6 / statistics.median(fetches)
    return found


def _deltas(folder: Path) -> list[Manifest]:
    found = []
    for path in sorted(folder.glob(f"*{MANIFEST}")):
        try:
            manifest = named_manifest(read_manifest_file(folder, path.stem), path.stem)
        except (OSError, WeightsError):
            continue  # it was removed meanwhile, or torn: the others tell as much
        if manifest.kind == "delta":
            found.append(manifest)
    return found


def _offers(
    config: Config,
    rates: Sequence[float],
    events: Mapping[str, Sequence[Mapping[str, Any]]],
    values: Mapping[str, float],
) -> list[OfferTable]:
    """One for each engine, precision and number of slots, with the price of the run's
    configuration; none if no rate was measured."""
    kinds = {
        event["worker"]: (event["engine"], event["precision"], event["slots"])
        for event in events["worker_joined"]
    }
    mean_rate = _fleet_rate(rates)
    if mean_rate is None or not kinds:
        return []
    trained = Counter(
        kinds[event["worker"]]
        for event in events["group_ended"]
        if event.get("end") == "trained" and event.get("worker") in kinds
    )
    counts = Counter(kinds.values())
    line_mbit = values.get("origin_uplink_mbit")
    found = []
    for number, (kind, groups) in enumerate(sorted(trained.items()), 1):
        engine, precision, slots = kind
        share = groups / trained.total() * counts.total() / counts[kind]
        links = {"uplink_mbit": line_mbit, "downlink_mbit": line_mbit} if line_mbit else {}
        found.append(
            OfferTable(
                name=f"{engine}-{precision}" + (f"-{number}" if len(trained) > 1 else ""),
                price_usd_per_h=config.worker.price_usd_per_h,
                tokens_per_s=mean_rate * share,
                count=counts[kind],
                slots=slots,
                **links,
            )
        )
    return found


def _numbers(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [line[key] for line in lines if _is_number(line.get(key))]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
