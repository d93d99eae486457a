"""`echo2 check`: the resolved configuration, and what follows from it in numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2.commands.run_folder import RunFolder
from echo2.config import Config, config_schema, config_to_toml, load_config
from echo2.config_rules import is_loopback
from echo2.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fact:
    """One consequence: `value` for programs, `text` for people."""

    name: str
    value: Any
    text: str


def main(
    path: Path | None,
    run_dir: Path | None,
    overrides: list[str],
    *,
    as_json: bool,
    schema: bool,
) -> int:
    if schema:
        print(json.dumps(config_schema(), indent=2, ensure_ascii=False))
        return 0
    if path is None:
        raise ConfigError("echo2 check needs a CONFIG, or --schema")
    config = load_config(path, overrides)
    shown = without_secrets(config)
    folder = RunFolder.of(config, run_dir).path
    found = facts(config, folder)
    if as_json:
        told = {fact.name: fact.value for fact in found}
        print(json.dumps({"config": shown.model_dump(), "facts": told}, indent=2))
        return 0
    print(config_to_toml(shown))
    print("# What follows")
    width = max(len(fact.name) for fact in found)
    for fact in found:
        print(f"#   {fact.name:<{width}}  {fact.text}")
    return 0


def without_secrets(config: Config) -> Config:
    """The same with the HTTP token replaced, fit for a screen or a bug report."""
    if not config.http.token:
        return config
    return config.model_copy(update={"http": config.http.model_copy(update={"token": "hidden"})})


def facts(config: Config, folder: Path) -> list[Fact]:
    """What follows from a valid configuration."""
    return [
        *_staleness(config),
        *_work(config),
        *_records(config),
        *_audit(config),
        *_network(config, folder),
        *_money(config),
        *_offers(config),
        *_activation(config),
        *_simulation(config),
        Fact("run_folder", str(folder), str(folder)),
    ]


_LATE = {
    "wait": "a batch waits for a live lease that would miss its window",
    "drop": "a group that misses its window is dropped",
    "mask": "tokens outside the window leave the loss, the rest is trained",
}
_ON_UPDATE = {
    "continue": "generations go on under the new version",
    "finish": "generations end under the old version first",
    "abort": "generations are broken off and leased again",
}


def _staleness(c: Config) -> list[Fact]:
    bound, rows = c.staleness.max, c.learner.groups_per_step
    most = rows * (bound + 1)
    lead = c.dispatch.lead_steps
    if lead is None:
        ahead = f"just enough to hide the group latency and an install, at most S = {bound} steps"
    else:
        ahead = f"{lead:g} steps ahead of the next batch, {lead * rows:g} groups"
    period = c.staleness.period
    publish = "every learner step" if period == 1 else f"every {period} learner steps"
    return [
        Fact(
            "staleness_max",
            bound,
            f"S = {bound}: no token is trained more than {bound} learner steps after the version "
            f"that sampled it{' (synchronous)' if bound == 0 else ''}; {_LATE[c.staleness.late]}",
        ),
        Fact("expiry", f"u + {bound}", f"a group sampled from version u is trained by u + {bound}"),
        Fact(
            "period",
            period,
            f"κ = {period}: a version is published after {publish} "
            f"(allowed 1 to {bound + 1}); {_ON_UPDATE[c.worker.on_update]}",
        ),
        Fact(
            "groups_max",
            most,
            f"R·(S + 1) = {rows}·{bound + 1} = {most} groups "
            f"({most * c.dispatch.group_size} trajectories) buffered or leased at most",
        ),
        Fact("lead_steps", lead, f"workers sample {ahead}"),
    ]


def _work(c: Config) -> list[Fact]:
    rows, size, steps = c.learner.groups_per_step, c.dispatch.group_size, c.learner.steps
    tokens = rows * size * c.sampling.max_tokens
    return [
        Fact(
            "trajectories_per_step",
            rows * size,
            f"R·G = {rows}·{size} = {rows * size} trajectories in {c.learner.updates_per_step} "
            f"optimizer update(s), {rows * steps} groups in {steps} steps",
        ),
        Fact(
            "tokens_per_step_max",
            tokens,
            f"R·G·max_tokens = {tokens} sampled tokens per step at most, for each turn",
        ),
        Fact(
            "learner_ranks",
            c.learner.ranks,
            "one process learns"
            if c.learner.ranks == 1
            else f"{c.learner.ranks} processes learn together, each holding 1/{c.learner.ranks} of "
            "weights, gradients and optimizer",
        ),
        Fact(
            "groups_in_work",
            c.workers.local * c.worker.slots,
            f"{c.workers.local} local worker(s) with engine {c.worker.engine} and "
            f"{c.worker.slots} slots each: {c.workers.local * c.worker.slots} groups at once",
        ),
    ]


def _records(c: Config) -> list[Fact]:
    steps, every = c.learner.steps, c.checkpoint.every_steps
    kept = min(c.rollouts.keep_steps, steps)
    named = {"tensorboard": c.trackers.tensorboard, "wandb": c.trackers.wandb}
    trackers = [name for name, is_on in named.items() if is_on]
    checkpoints = _times(steps, every)
    found = [
        Fact(
            "checkpoints",
            checkpoints,
            f"{checkpoints} written (every {every} steps and at the end), "
            f"the newest {min(checkpoints, c.checkpoint.keep)} kept",
        ),
        Fact(
            "rollouts",
            kept,
            f"those of the newest {kept} steps kept, {c.rollouts.bytes_max / 2**20:.0f} MiB at most"
            if kept
            else "none kept (rollouts.keep_steps = 0)",
        ),
        Fact("trackers", trackers, ", ".join(["metrics.jsonl", *trackers])),
    ]
    if not c.eval.every_steps:
        return [*found, Fact("evals", 0, "none (eval.every_steps = 0)")]
    evals = 1 + _times(steps, c.eval.every_steps)
    sampled = c.eval.num_tasks * c.eval.group_size
    return [
        *found,
        Fact(
            "evals",
            evals,
            f"{evals} of {sampled} trajectories each: at step 0, every {c.eval.every_steps} "
            "steps and at the end",
        ),
    ]


def _times(steps: int, every: int) -> int:
    """How often something happens after every so many steps and after the last."""
    return -(-steps // every)


def _network(c: Config, folder: Path) -> list[Fact]:
    ports = {
        "control": (c.net.host, c.net.control_port),
        "rollouts": (c.net.host, c.net.rollouts_port),
        "origin": (c.net.host, c.net.origin_port),
    }
    if c.net.curve:
        ports["join"] = (c.net.host, c.net.join_port)
    if c.http.enabled:
        ports["http"] = (c.http.host, c.http.port)
    told = [f"{name} {host}:{port or 'any free port'}" for name, (host, port) in ports.items()]
    keys = c.net.keys_dir or str(folder / "keys")
    if c.net.curve:
        security = f"CURVE on every socket, allow-list in {keys}/authorized"
    else:
        security = "CURVE off: any process on this machine may join"
    if not c.http.enabled:
        http = "no HTTP"
    elif is_loopback(c.http.host):
        http = "HTTP on loopback" + (" with a token" if c.http.token else "")
    else:
        http = "HTTP for other machines, with a token"
    up, down = c.worker.uplink_mbit, c.worker.downlink_mbit
    lines = [
        f"forward {f'{up:g} Mbit/s at most' if up else 'what their uplinks carry'}",
        f"receive {f'{down:g} Mbit/s at most' if down else 'what is measured'}",
    ]
    relays = " and ".join(lines) if c.worker.relay else "off: all comes from the origin"
    return [
        Fact("endpoints", {k: f"{h}:{p}" for k, (h, p) in ports.items()}, ", ".join(told)),
        Fact("security", {"curve": c.net.curve, "keys": keys}, f"{security}; {http}"),
        Fact(
            "relays",
            {"on": c.worker.relay, "uplink_mbit": up, "downlink_mbit": down},
            f"workers {relays}" if c.worker.relay else relays,
        ),
    ]


def _audit(c: Config) -> list[Fact]:
    audit = c.audit
    then = "quarantined" if audit.action == "quarantine" else "reported"
    texts = [f"{audit.mismatch_needed} observations of odd logprobs"]
    if audit.share:
        texts.append(f"{audit.refuted_needed} refuted groups")
    rewards = (
        f"rewards of {audit.share:.3g} of the groups are recomputed by {', '.join(audit.workers)}"
        if audit.share
        else "no rewards are recomputed"
    )
    return [
        Fact(
            "audit",
            {"share": audit.share, "workers": list(audit.workers), "action": audit.action},
            f"{rewards}; a worker is {then} after {' or '.join(texts)}",
        )
    ]


def _simulation(c: Config) -> list[Fact]:
    table = c.simulation
    if not table.workers:
        return []
    count = sum(kind.count for kind in table.workers)
    per_h = sum(kind.count * kind.price_usd_per_h for kind in table.workers)
    return [
        Fact(
            "simulated_workers",
            count,
            f"echo2 simulate plays {count} workers of {len(table.workers)} kinds for "
            f"{table.hours:g} hours at most; with the learner they cost "
            f"${per_h + c.cost.learner_usd_per_h:g} per hour while all are there",
        )
    ]


def _money(c: Config) -> list[Fact]:
    per_hour = c.cost.learner_usd_per_h + c.workers.local * c.worker.price_usd_per_h
    if not per_hour:
        text = "no prices given (cost.learner_usd_per_h, worker.price_usd_per_h)"
    else:
        text = f"learner and local workers cost ${per_hour:g} per hour"
    if c.budget.max_usd:
        text += f"; the run ends when ${c.budget.max_usd:g} is spent"
        if per_hour:
            text += f", after {c.budget.max_usd / per_hour:.3g} hours of these"
    return [Fact("usd_per_h", per_hour, text)]


def _activation(c: Config) -> list[Fact]:
    """Nothing where every worker works and is started by hand."""
    if c.activation.policy == "all" and c.provisioner.kind == "static":
        return []
    who = "whoever joins works"
    if c.activation.policy == "cheapest":
        who = (
            f"the cheapest workers with {c.activation.margin:g} times the rate that the learner "
            "needs work"
        )
    machines = "daemons are started by hand, and the others stand by"
    if c.provisioner.kind != "static":
        machines = (
            f"machines of the offers are started and stopped by {c.provisioner.kind}, at most "
            f"{c.provisioner.max_workers} at once"
        )
    facts = {"policy": c.activation.policy, "provisioner": c.provisioner.kind}
    return [Fact("activation", facts, f"{who}; {machines}")]


def _offers(c: Config) -> list[Fact]:
    if not c.offers:
        return []
    machines = sum(offer.count for offer in c.offers)
    return [
        Fact(
            "offers",
            {offer.name: offer.count for offer in c.offers},
            f"{machines} machine(s) of {len(c.offers)} kind(s) on offer; echo2 plan says which to "
            "have",
        )
    ]
