"""What `echo2 run` and `echo2 status` show of a run: its newest metrics and its status.

Metrics come from the end of metrics.jsonl (the learner writes it), status from the
coordinator's /api/status. Either may be missing: what is not known is shown as "-".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from echo2.errors import Echo2Error

LASTING_S: Final = 10.0
"""A wait that is older is told of without being asked."""


async def fetch_status(
    session: aiohttp.ClientSession, url: str, token: str, *, timeout_s: float = 5.0
) -> dict[str, Any]:
    """The coordinator's /api/status. Raises Echo2Error with the cause."""
    address = f"{url.rstrip('/')}/api/status"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with session.get(
            address, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s)
        ) as reply:
            if reply.status in (401, 403):
                raise Echo2Error(f"{address} wants its http.token: give --token")
            if reply.status != 200:
                raise Echo2Error(
                    f"{address} answered {reply.status} {reply.reason}; is this the http of a "
                    "coordinator?"
                )
            status = await reply.json()
    except TimeoutError as error:
        raise Echo2Error(f"{address} did not answer within {timeout_s:g} s") from error
    except aiohttp.InvalidURL as error:
        raise Echo2Error(
            f'"{url}" is no address of a coordinator; give http://HOST:PORT, as its log and '
            "RUN/coordinator.json name it"
        ) from error
    except aiohttp.ClientConnectionError as error:
        raise Echo2Error(
            f"nothing answers at {address}; does the coordinator run there, and can this machine "
            "reach it?"
        ) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise Echo2Error(
            f"{address} answered what is no status ({error}); is this the http of a coordinator?"
        ) from error
    if not isinstance(status, dict):
        raise Echo2Error(f"{address} answered no JSON object")
    return status


@dataclass(slots=True)
class RunView:
    """The newest that is known. `line`: the newest line of metrics; `evaluated`: the
    newest line that holds an eval."""

    name: str
    steps: int
    line: dict[str, Any] = field(default_factory=dict)
    evaluated: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)

    def take_line(self, line: dict[str, Any]) -> None:
        if line.get("eval_reward") is not None:
            self.evaluated = line
        if isinstance(line.get("step"), int):
            self.line = line

    @property
    def step(self) -> int:
        known = (self.line.get("step"), self.status.get("step"))
        return max((step for step in known if isinstance(step, int)), default=0)

    @property
    def version(self) -> str:
        versions = self.status.get("versions") or {}
        return str(versions.get("published") or "-")

    @property
    def evaluation(self) -> str:
        """Newest eval reward with the version that earned it."""
        reward, version = self.evaluated.get("eval_reward"), self.evaluated.get("eval_version")
        return "-" if reward is None else f"{number(reward)} @ v{version}"

    @property
    def staleness(self) -> str:
        mean, most = self.line.get("staleness_mean"), self.line.get("staleness_max")
        return f"{number(mean)} mean, {number(most)} max"

    @property
    def cost(self) -> str:
        dollars = self.status.get("cost_usd", self.line.get("cost_usd"))
        return "-" if dollars is None else f"${dollars:.4f}"

    @property
    def buffered(self) -> str:
        return number((self.status.get("buffer") or {}).get("total"))

    @property
    def workers(self) -> list[dict[str, Any]]:
        return list(self.status.get("workers") or [])

    @property
    def lasting_waits(self) -> list[dict[str, Any]]:
        """Those that are more than the normal life of a run."""
        waits = self.status.get("waits") or []
        return [wait for wait in waits if wait.get("since_s", 0.0) >= LASTING_S]

    @property
    def tokens_per_s(self) -> str:
        return number(self.status.get("tokens_per_s", self.line.get("tokens_per_s")))

    def plain_line(self) -> str:
        """One line for a log or a pipe."""
        bubble = self.line.get("bubble_ratio")
        told = {
            "version": self.version,
            "reward": number(self.line.get("reward_mean")),
            "eval": self.evaluation,
            "staleness": self.staleness,
            "tokens/s": self.tokens_per_s,
            "bubble": "-" if bubble is None else f"{bubble:.0%}",
            "buffer": self.buffered,
            "leases": number(self.status.get("leases")),
            "workers": str(len(self.workers)),
            "cost": self.cost,
        }
        inner = "  ".join(f"{name} {value}" for name, value in told.items())
        return f"step {self.step}/{self.steps}  {inner}"


def number(value: Any) -> str:
    """A number with three significant digits, or "-"."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def told_wait(wait: Mapping[str, Any]) -> str:
    """Who waits for what, since when, and what ends it, in a sentence."""
    ends_in_s = wait.get("ends_in_s")
    deadline = "" if ends_in_s is None else f" in {max(0.0, ends_in_s):.0f} s"
    return (
        f"{wait.get('text')}, since {wait.get('since_s') or 0.0:.0f} s  "
        f"({wait.get('owner')}: {wait.get('then')}{deadline})"
    )


def told_ends(ends: Mapping[str, int]) -> str:
    """How many groups ended how, as "512 trained, 3 expired"."""
    return ", ".join(f"{count} {end}" for end, count in ends.items() if count) or "-"
