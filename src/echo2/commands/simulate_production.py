"""The paper's scenarios as the production core plays them, and what echo2 adds to them.

The very fleet of a scenario, its lines, prices and T_train, on the virtual clock: the dispatcher
with its pacing and its hold, groups of unequal length, relay plans (a star where nobody accepts a
connection). Nothing of the paper's equations is left in it but the number of machines and κ.

Then one thing after the other is added to the first scenario, each with the machines that the rule
asks for by then: deltas, the set that is proven the cheapest, and last κ and machines of echo2's
own capacity model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from echo2.commands.simulate_run import HOURS_MAX, plan_of
from echo2.config import Config
from echo2.config_simulation import SimulatedWorkersTable
from echo2.core.activation import Offer, cheapest_set
from echo2.core.capacity_paper import GAMMA, FixedPoint, paper_fixed_point
from echo2.core.capacity_pool import Pool
from echo2.core.capacity_spread import Weights
from echo2.core.fleet_echo2 import Echo2Model
from echo2.core.fleet_plan import plan_row
from echo2.core.fleet_terms import Machine, RunTerms
from echo2.core.paper_ablation import Scenario, Setting, by_price, paper_bcast_s, scenario_pool
from echo2.sim.virtual.steady import Steady, steady_figures

STEPS_LEFT_OUT: Final = 6
"""At the beginning of what is played: the whole first version, and the first batches."""
TICKS_PER_STEP: Final = 200.0


@dataclass(frozen=True, slots=True)
class Played:
    name: str
    machines: int
    period: int
    steady: Steady

    def cells(self) -> list[str]:
        steady, bcast_s = self.steady, self.steady.t_bcast_s
        return [
            self.name,
            str(self.machines),
            str(self.period),
            f"{steady.usd_per_step:.3f}",
            "-" if bcast_s is None else f"{bcast_s:.0f}",
            f"{steady.wait_s * self.period:.1f}",
            f"{steady.bubble_ratio:.1%}",
        ]

    def to_json(self) -> dict[str, Any]:
        """`wait_s` once a period, as the paper counts it."""
        return {
            "name": self.name,
            "machines": self.machines,
            "period": self.period,
            "cost_per_step_usd": self.steady.usd_per_step,
            "t_bcast_s": self.steady.t_bcast_s,
            "wait_s": self.steady.wait_s * self.period,
            "step_s": self.steady.step_s,
            "bubble_ratio": self.steady.bubble_ratio,
        }


def production(config: Config, setting: Setting, scenarios: Sequence[Scenario]) -> list[Played]:
    """Each scenario, with the machines that it has by the paper's equations."""
    return [
        _played(
            config,
            each.name,
            scenario_pool(setting, each),
            period=setting.period,
            delta_share=1.0,
            peers=each.peers,
        )
        for each in scenarios
    ]


def additions(config: Config, setting: Setting, scenario: Scenario, first: Played) -> list[Played]:
    """`first` is that scenario without any of them."""
    found, share = [replace(first, name=f"nothing ({scenario.name})")], 1.0
    order, period = by_price(setting.pool), setting.period
    for share in config.simulation.production_delta_shares:
        point = _by_the_rule(setting, share)
        found.append(
            _played(config, f"deltas of {share:.0%}", point.pool, period=period, delta_share=share)
        )
    wanted = _by_the_rule(setting, share).mu_target
    chosen = cheapest_set(
        [Offer(kind.name, kind.usd_per_h, kind.rate_groups_per_s) for kind in order], wanted
    )
    pool = Pool.of(kind for kind in order if chosen.counts.get(kind.name))
    found.append(_played(config, "exact activation", pool, period=period, delta_share=share))
    row = plan_row(
        _terms(config, setting, share),
        [Machine(kind=kind) for kind in order],
        Echo2Model(),
        staleness_max=config.staleness.max,
    )
    if row is not None:
        pool = Pool.of(kind for kind in order if row.counts.get(kind.name))
        found.append(_played(config, "capacity model", pool, period=row.period, delta_share=share))
    return found


def _by_the_rule(setting: Setting, share: float) -> FixedPoint:
    sent = replace(setting, size_mbit=setting.size_mbit * share)
    return paper_fixed_point(
        by_price(setting.pool),
        groups_per_step=setting.groups_per_step,
        train_s=setting.train_s,
        period=setting.period,
        bcast_s=lambda pool: paper_bcast_s(sent, pool, peers=True),
    )


def _terms(config: Config, setting: Setting, share: float) -> RunTerms:
    return RunTerms(
        groups_per_step=setting.groups_per_step,
        train_s=setting.train_s,
        weights=Weights(
            num_bytes=round(1e6 * config.simulation.version_mb),
            origin_up_mbit=setting.origin_mbit,
            delta_share=share,
        ),
        learner_usd_per_h=setting.learner_usd_per_h,
        latency_cv=config.worker.null.tokens_cv,
        rate_margin=GAMMA,
        late=config.staleness.late,
        lead_steps=config.dispatch.lead_steps,
    )


def _played(
    config: Config,
    name: str,
    pool: Pool,
    *,
    period: int,
    delta_share: float,
    peers: bool = True,
) -> Played:
    simulation = config.simulation.model_copy(
        update={
            "workers": list(_fleet(config, pool, peers=peers)),
            "delta_share": delta_share,
        }
    )
    case = config.model_copy(
        update={
            "simulation": simulation,
            "staleness": config.staleness.model_copy(update={"period": period}),
        }
    )
    steps = STEPS_LEFT_OUT + simulation.production_steps
    plan = replace(
        plan_of(case, hours=HOURS_MAX, steps=None, seed=None),
        steps=steps,
        tick_max_s=simulation.learner_step_s / TICKS_PER_STEP,
    )
    return Played(name, pool.num_workers, period, steady_figures(plan, left_out=STEPS_LEFT_OUT))


def _fleet(config: Config, pool: Pool, *, peers: bool) -> Iterator[SimulatedWorkersTable]:
    tokens = config.worker.null.tokens_mean
    for place, (kind, count) in enumerate(pool.members, 1):
        yield SimulatedWorkersTable(
            name=f"m{place}",
            count=count,
            tokens_per_s=kind.rate_groups_per_s * tokens / kind.slots,
            slots=kind.slots,
            price_usd_per_h=kind.usd_per_h,
            uplink_mbit=kind.up_mbit,
            downlink_mbit=kind.down_mbit,
            reachable=peers and kind.accepts,
            install_s=kind.install_s,
        )
