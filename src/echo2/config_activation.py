"""The tables [activation], [provisioner] and [budget]: who works, who starts machines, what it
may cost."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from echo2.config_table import NonNegativeSeconds, PositiveSeconds, Table

if TYPE_CHECKING:
    from echo2.config import Config

BUILT_IN: Final = ("static", "command", "skypilot")
PLACEHOLDERS: Final = ("offer", "worker", "token", "id", "run_dir")
ARGUMENTS_MAX: Final = 256
OFFER_NAME_MAX: Final = 40
"""Of an offer whose machines are started: a worker's name is it, a dash, and up to 20 more."""

Command = Annotated[list[Annotated[str, Field(max_length=32_768)]], Field(max_length=ARGUMENTS_MAX)]


class ActivationTable(Table):
    """Which of the workers work (docs/activation.md)."""

    policy: Literal["all", "cheapest"] = "all"
    """"all": whoever joins works. "cheapest": the cheapest workers whose summed rate is enough for
    the learner; the others stand by."""
    margin: Annotated[float, Field(ge=1, le=10)] = 1.1
    """γ: the summed rate of the active workers over what the learner needs."""
    surplus_share: Annotated[float, Field(ge=0, le=10)] = 0.15
    """Share of the wanted rate that must be left over before a worker is released."""
    persistence_s: NonNegativeSeconds = 60.0
    """Too little or too much must last for so long before anything is done about it."""
    cool_down_s: NonNegativeSeconds = 120.0
    """After a change, time until the next."""
    errors: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Standard errors of the summed rate that a deviation must exceed."""
    prior_samples: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """As how many measurements the rate counts that was assumed of a worker."""


class ProvisionerTable(Table):
    """Who starts and stops the machines of [[offers]]."""

    kind: Annotated[str, Field(pattern=r"^(static|command|skypilot|[\w.]+:\w+)$")] = "static"
    """"static": daemons are started by others, and only stand by when they are not needed.
    "command": by the commands below. "skypilot": by SkyPilot (extra "skypilot"). Or a class of
    yours, "package.module:Class" (echo2.provision.Provisioner)."""
    start_command: Command = Field(default_factory=list)
    """Program and arguments, without a shell, that start a machine which runs
    `echo2 worker --join {token}`, and end then. {offer}, {worker}, {token} and {run_dir} are filled
    in; the last line that it prints is the machine's {id}."""
    stop_command: Command = Field(default_factory=list)
    """Stops the machine of {worker}; {id} is what its start printed, or "". It ends well where
    there is no such machine (any more)."""
    list_command: Command = Field(default_factory=list)
    """Prints the {worker} names of the machines that are there, one a line; optional."""
    max_workers: Annotated[int, Field(ge=1, le=1000)] = 100
    """Most machines at once, of all offers together."""
    start_timeout_s: PositiveSeconds = 600.0
    """A start that takes longer is ended, and its machine stopped."""
    stop_timeout_s: PositiveSeconds = 120.0
    ready_timeout_s: PositiveSeconds = 900.0
    """A machine whose worker is not ready so long after it was started, or is away for so long, is
    stopped."""
    retry_s: PositiveSeconds = 5.0
    """A stop that failed is tried again after this, then after twice as long each time, up to
    five minutes."""
    stop_attempts: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Tries after which a machine that cannot be stopped is left, written down still."""
    reap_after_s: NonNegativeSeconds = 120.0
    """When the coordinator is gone and none took its place for so long, every machine is
    stopped."""
    task: str = ""
    """With kind = "skypilot": a task's YAML file, which runs `echo2 worker --join $ECHO2_TOKEN`."""


class BudgetTable(Table):
    max_usd: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """The run ends cleanly when this is spent; 0: no limit."""


def provisioner_problem(c: Config) -> str | None:
    """The rule over [provisioner]."""
    p = c.provisioner
    if p.kind != "command":
        given = [k for k in ("start_command", "stop_command", "list_command") if getattr(p, k)]
        if given:
            return f'{given[0]} is for kind = "command", and kind is "{p.kind}"; leave it out'
    if p.kind == "static":
        return None
    if p.kind == "command" and not (p.start_command and p.stop_command):
        return (
            'kind = "command" needs start_command and stop_command, for example '
            'start_command = ["./rent.sh", "{offer}", "{worker}", "{token}"]'
        )
    if p.kind == "skypilot" and not p.task:
        return 'kind = "skypilot" needs task, the YAML file of a SkyPilot task'
    if not c.offers:
        return f'kind = "{p.kind}" starts machines of [[offers]], and there are none; give one'
    if not c.net.curve:
        return f'kind = "{p.kind}" lets workers in by join tokens, which need net.curve = true'
    long = next((o.name for o in c.offers if len(o.name) > OFFER_NAME_MAX), None)
    if long is not None:
        return (
            f'offer "{long}" has {len(long)} characters, and a worker\'s name begins with it; '
            f"at most {OFFER_NAME_MAX} are allowed"
        )
    return _placeholders(c)


def _placeholders(c: Config) -> str | None:
    p = c.provisioner
    for key in ("start_command", "stop_command", "list_command"):
        if getattr(p, key) and not getattr(p, key)[0]:
            return f'{key} begins with "", and has to begin with a program'
    for key in ("start_command", "stop_command", "list_command"):
        for argument in getattr(p, key):
            for name in _named(argument):
                if name not in PLACEHOLDERS:
                    return (
                        f"{key} names {{{name}}}; filled in are "
                        + ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
                        + "; put what needs other braces into a script"
                    )
    return None


def _named(argument: str) -> list[str]:
    return re.findall(r"\{([a-z_]+)\}", argument)


def activation_problem(c: Config) -> str | None:
    """The rule over [activation]."""
    if c.activation.policy == "all" or c.provisioner.kind == "static":
        return None
    if c.provisioner.max_workers and all(not offer.price_usd_per_h for offer in c.offers):
        return (
            '"cheapest" chooses among [[offers]] by price_usd_per_h, and all of them are 0; give '
            'prices, or policy = "all"'
        )
    return None
