"""Settings: the TOML file, its keys and values, what they mean together, and --set."""

from __future__ import annotations

from bad_input import Bench, Told, a_place_without_rights, case

from echo2.provision.book import MachineBook, MachineRecord


@case("a line that is not TOML")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[learner]", "steps ="))


@case("a text without its closing quote")
def _(bench: Bench) -> Told:
    bench.config_path.write_text('[run]\nname = "tiny')
    return bench.command("check", bench.config_path)


@case("a table that is there twice")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[learner]", "steps = 3", "[learner]"))


@case("a file that is not UTF-8")
def _(bench: Bench) -> Told:
    bench.config_path.write_bytes(b'[run]\nname = "\xff"\n')
    return bench.command("check", bench.config_path)


@case("a file that is not there, while one of nearly its name is")
def _(bench: Bench) -> Told:
    (bench.folder / "quickstart.toml").touch()
    return bench.command("check", bench.folder / "quikstart.toml")


@case("a file in a folder that is not there")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.folder / "none" / "run.toml")


@case("a folder instead of a file")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.folder)


@case("a file that this user may not read")
def _(bench: Bench) -> Told:
    bench.command("check", bench.folder)  # what is imported, is imported with all rights
    with a_place_without_rights(bench, readable=False) as folder:
        return bench.command("check", folder / "run.toml")


@case("a key that is nearly one")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[log]", 'levels = "info"'))


@case("a key of another table")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[http]", "curve = true"))


@case("a table that is nearly one")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[rollout]", "keep_steps = 3"))


@case("a number in quotes")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[learner]", 'learning_rate = "2e-4"'))


@case("a number out of its range")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[staleness]", "max = -1"))


@case("a word that is none of those allowed")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[staleness]", 'late = "wiat"'))


@case("a value where a table belongs")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("cost = 3"))


@case("a name with a space")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[run]", 'name = "my run"'))


@case("a precision that cannot be published")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[model]", 'dtype = "float16"'))


@case("several mistakes at once")
def _(bench: Bench) -> Told:
    lines = ("[budget]", "max_us = 3", "[staleness]", "max = 1", "period = 5")
    return bench.command("check", bench.config(*lines), "--set", "log.level=loud")


@case("a period that outlasts the window")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[staleness]", "max = 1", "period = 3"))


@case("late = mask while generations are broken off")
def _(bench: Bench) -> Told:
    lines = ("[staleness]", 'late = "mask"', "[worker]", 'on_update = "abort"')
    return bench.command("check", bench.config(*lines))


@case("heartbeats in the wrong order")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[heartbeat]", "suspect_s = 20"))


@case("an environment's setting that cannot travel")
def _(bench: Bench) -> Told:
    lines = ("[environment.settings]", "since = 2026-01-01")
    return bench.command("check", bench.config(*lines))


@case("a group too large for a message")
def _(bench: Bench) -> Told:
    lines = ("[sampling]", "max_tokens = 262144", "[dispatch]", "group_size = 1024")
    return bench.command("check", bench.config(*lines))


@case("--set without a value")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config(), "--set", "learner.steps")


@case("--set of what is no key")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config(), "--set", "learner steps=3")


@case("--set of a key below a value")
def _(bench: Bench) -> Told:
    config = bench.config("[learner]", "steps = 5")
    return bench.command("check", config, "--set", "learner.steps.more=3")


@case("--set of a list without its end")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config(), "--set", "sampling.stop=[1,")


@case("no local worker for echo2 run")
def _(bench: Bench) -> Told:
    return bench.command("run", bench.config("[workers]", "local = 0"))


@case("the budget under its old name")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[cost]", "budget_usd = 20.0"))


@case("a provisioner without its commands")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[provisioner]", 'kind = "command"'))


_COMMANDS = (
    "[provisioner]",
    'kind = "command"',
    'stop_command = ["./stop.sh", "{worker}"]',
)


@case("a provisioner without offers")
def _(bench: Bench) -> Told:
    start = 'start_command = ["./start.sh", "{offer}"]'
    return bench.command("check", bench.config(*_COMMANDS, start))


@case("a command with a placeholder that is none")
def _(bench: Bench) -> Told:
    start = 'start_command = ["./start.sh", "{machine}"]'
    offer = (*_OFFER, "price_usd_per_h = 0.35")
    return bench.command("check", bench.config(*_COMMANDS, start, *offer))


@case("a provisioner that cannot be made (echo2 coordinator)")
def _(bench: Bench) -> Told:
    lines = ("[provisioner]", 'kind = "no_such_package.rent:Rent"')
    config = bench.config(*lines, *_OFFER, "price_usd_per_h = 0.35")
    return bench.command("coordinator", config, "--run-dir", bench.run_dir)


@case("machines that may be on, and nobody to stop them (echo2 coordinator)")
def _(bench: Bench) -> Told:
    MachineBook(bench.run_dir).write(MachineRecord(worker="rtx-5090-1", offer="rtx-5090"))
    return bench.command("coordinator", bench.config(), "--run-dir", bench.run_dir)


@case("audits by nobody")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[audit]", "share = 0.1"))


@case("audits of what cannot be played again")
def _(bench: Bench) -> Told:
    lines = ("[audit]", "share = 0.1", 'workers = ["w-1"]')
    config = bench.config(*lines, "[environment]", 'name = "verifiers:gsm8k"')
    return bench.command("check", config)


_OFFER = ("[[offers]]", 'name = "rtx-5090"', "groups_per_s = 0.2")


@case("an offer with a key that is nearly one")
def _(bench: Bench) -> Told:
    path = bench.config(*_OFFER, "price_usd_per_h = 0.35", "uplink_mbits = 100")
    return bench.command("check", path)


@case("an offer without its price")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config(*_OFFER))


@case("offers in single brackets")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[offers]", "count = 2"))


@case("two offers of one name")
def _(bench: Bench) -> Told:
    offer = (*_OFFER, "price_usd_per_h = 0.35")
    return bench.command("check", bench.config(*offer, *offer))


@case("an offer with two rates")
def _(bench: Bench) -> Told:
    path = bench.config(*_OFFER, "price_usd_per_h = 0.35", "tokens_per_s = 5000")
    return bench.command("check", path)


@case("--set of an offer that is not there")
def _(bench: Bench) -> Told:
    path = bench.config(*_OFFER, "price_usd_per_h = 0.35")
    return bench.command("check", path, "--set", "offers.rtx5090.count=3")


@case("a plan without assumptions")
def _(bench: Bench) -> Told:
    return bench.command("plan", bench.config("[plan]", "train_s = 30"))


@case("a plan from a run that has not measured all")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "config.resolved.toml").touch()
    (bench.run_dir / "metrics.jsonl").write_text('{"step": 1, "train_s": 2.5}\n')
    return bench.command("plan", bench.config(), "--from-run", bench.run_dir)


@case("a plan from a folder that is no run")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    return bench.command("plan", bench.config(), "--from-run", bench.run_dir)


@case("a plan from a run that trained no step")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "config.resolved.toml").touch()
    return bench.command("plan", bench.config(), "--from-run", bench.run_dir)


@case("a plan's picture that is no SVG")
def _(bench: Bench) -> Told:
    return bench.command("plan", bench.config(), "--picture", "plan.png")


@case("a calibration of an engine that samples nothing")
def _(bench: Bench) -> Told:
    return bench.command("plan", bench.config("[worker]", 'engine = "none"'), "--calibrate")


@case("a calibration of a learner of several ranks")
def _(bench: Bench) -> Told:
    return bench.command("plan", bench.config("[learner]", "ranks = 2"), "--calibrate")


@case("a plan over no S")
def _(bench: Bench) -> Told:
    return bench.command("plan", bench.config("[plan]", "staleness_min = 7"))
