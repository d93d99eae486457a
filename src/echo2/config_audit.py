"""The table [audit]: how far workers are believed, and what becomes of those that are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from echo2.config_table import PositiveSeconds, Table

if TYPE_CHECKING:
    from echo2.config import Config


class AuditTable(Table):
    """Workers are not trusted (docs/security.md): rewards of some groups are recomputed by a
    trusted worker, and logprobs are compared with the learner's."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of all groups whose rewards are recomputed; 0: none. It needs `workers`."""
    workers: list[Annotated[str, Field(pattern=r"^[\w-][\w.-]{0,63}$")]] = Field(
        default_factory=list, max_length=256
    )
    """Auditors: trusted workers, by the names under which the allow-list holds their keys. They
    sample too, and never audit their own groups."""
    reward_tolerance: Annotated[float, Field(ge=0, le=1e9)] = 1e-6
    """A recomputed reward may differ from the claimed one by so much."""
    wait_s: PositiveSeconds = 60.0
    """A group waits for its verdict for so long; then it is trained unaudited."""
    in_flight: Annotated[int, Field(ge=1, le=64)] = 8
    """Groups that one auditor is asked about at once."""
    refuted_needed: Annotated[int, Field(ge=1, le=1000)] = 2
    """Refuted groups of a worker until it is an offender; each confirmed one counts a tenth
    against them."""
    mismatch_needed: Annotated[int, Field(ge=1, le=1000)] = 3
    """Observations of suspicious logprobs until a worker is an offender; each other one counts a
    tenth against them."""
    mismatch_tokens: Annotated[int, Field(ge=1, le=2**31)] = 64
    """Tokens of an observation: compared groups are put together until they have so many."""
    mismatch_factor: Annotated[float, Field(ge=1, le=1000)] = 6.0
    """Suspicious is a difference above the fleet's centre by so many times its spread."""
    mismatch_floor: Annotated[float, Field(gt=0, le=100)] | None = None
    """No difference below this is suspicious, in nats; by default that of the worker's precision
    (1e-4 for float32, 5e-2 for bfloat16, 1e-1 for fp8 and int8, 3e-1 for int4)."""
    action: Literal["quarantine", "report"] = "quarantine"
    """An offender is quarantined until `echo2 keys pardon`, or only reported in events.jsonl."""


NOT_REPLAYED = "verifiers:"
"""Environments of this prefix cannot play a transcript again."""


def audit_problem(c: Config) -> str | None:
    """The rule over audit.share."""
    if c.audit.share == 0.0:
        return None
    if not c.audit.workers:
        return (
            f"{c.audit.share:g} of the groups would be audited by nobody; name trusted workers in "
            'audit.workers, such as ["w-trusted"], or set it to 0'
        )
    if c.environment.name.startswith(NOT_REPLAYED):
        return (
            f"groups of {c.environment.name!r} cannot be audited: its rollouts ask the policy "
            "through an endpoint, and cannot be played again from their tokens; set it to 0"
        )
    return None
