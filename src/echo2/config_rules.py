"""Rules between settings: what each table's own bounds cannot say.

A rule names the keys that it reads, so that the loader skips it while one of them is wrong
itself. It answers None or one sentence with the values, what is allowed and what to do.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from echo2.config_activation import activation_problem, provisioner_problem
from echo2.config_audit import audit_problem
from echo2.config_offers import offer_names_problem, offer_rates_problem, plan_range_problem
from echo2.config_simulation import simulation_problem
from echo2.config_vllm import engine_args_problem, stop_problem
from echo2.messages import GROUP_FRAME_MAX_BYTES
from echo2.types import TOKENS_MAX

if TYPE_CHECKING:
    from echo2.config import Config

EVAL_TASKS_MAX: Final = 65536
"""Tasks of one EvalRequest message."""
_TOKEN_BYTES: Final = 9
"""int32 token, float32 logprob and one byte of mask."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`key` is the setting that the sentence of `check` is told under."""

    key: str
    reads: tuple[str, ...]
    check: Callable[[Config], str | None]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _period(c: Config) -> str | None:
    bound = c.staleness.max + 1
    if c.staleness.period <= bound:
        return None
    return (
        f"{c.staleness.period} exceeds S + 1 = {bound}: the last version would expire before the "
        f"next is published; allowed are 1 to {bound}; raise staleness.max or publish more often"
    )


def _mask(c: Config) -> str | None:
    if c.staleness.late != "mask" or c.worker.on_update == "continue":
        return None
    return (
        f'"mask" needs worker.on_update = "continue", not "{c.worker.on_update}": only '
        "generations that go on over an update have tokens inside and outside the window; "
        'set worker.on_update = "continue", or staleness.late to "wait" or "drop"'
    )


def _lead(c: Config) -> str | None:
    lead = c.dispatch.lead_steps
    if lead is None or lead <= c.staleness.max:
        return None
    return (
        f"{lead:g} exceeds S = {c.staleness.max}: what is sampled further ahead would be expired "
        f"when its turn comes; allowed are 0 to {c.staleness.max}; leave it out for the default, "
        "or raise staleness.max"
    )


def _heartbeat(c: Config) -> str | None:
    h = c.heartbeat
    if h.interval_s < h.suspect_s < h.gone_s:
        return None
    return (
        f"interval_s {h.interval_s:g}, suspect_s {h.suspect_s:g} and gone_s {h.gone_s:g} must "
        "rise in this order, or a healthy peer is taken for dead; the defaults are 1, 5 and 15"
    )


def _http_token(c: Config) -> str | None:
    if not c.http.enabled or is_loopback(c.http.host) or c.http.token:
        return None
    return (
        f'"{c.http.host}" is not loopback, so anyone who reaches it could read the run: set '
        'http.token to a secret, or http.host = "127.0.0.1", or http.enabled = false'
    )


def _curve(c: Config) -> str | None:
    if c.net.curve or is_loopback(c.net.host):
        return None
    return (
        f'false is allowed only while net.host is loopback, and it is "{c.net.host}": set '
        'net.curve = true, or net.host = "127.0.0.1"'
    )


def _host(c: Config) -> str | None:
    if c.net.host not in ("", "*", "0.0.0.0", "::", "[::]"):
        return None
    return (
        f'"{c.net.host}" is no address that a peer can dial, and peers are told this very one: '
        "give the address or name under which the others reach this machine"
    )


def _coordinator(c: Config) -> str | None:
    given = {
        "net.coordinator": c.net.coordinator,
        "net.coordinator_rollouts": c.net.coordinator_rollouts,
    }
    for key, value in given.items():
        if value and not re.fullmatch(r"tcp://[^\s*/]+:\d{1,5}", value):
            return f'{key} is "{value}"; the form is "tcp://HOST:PORT"'
    missing = [key for key, value in given.items() if not value]
    if c.net.curve:
        given["net.coordinator_key"] = c.net.coordinator_key
        missing += [] if c.net.coordinator_key else ["net.coordinator_key"]
    if missing and any(given.values()):
        return (
            "a daemon on another machine needs net.coordinator, net.coordinator_rollouts and "
            f"net.coordinator_key together; missing: {', '.join(missing)}; on the coordinator's "
            "own machine leave all of them out"
        )
    if c.net.coordinator_key and len(c.net.coordinator_key) != 40:
        return (
            f"net.coordinator_key has {len(c.net.coordinator_key)} characters; a CURVE key in z85 "
            "has 40: copy public_key from the coordinator's RUN/coordinator.json"
        )
    return None


def _ports(c: Config) -> str | None:
    ports = {
        "net.control_port": c.net.control_port,
        "net.rollouts_port": c.net.rollouts_port,
        "net.origin_port": c.net.origin_port,
        "net.join_port": c.net.join_port,
    }
    if c.http.enabled and c.http.host == c.net.host:
        ports["http.port"] = c.http.port
    owners: dict[int, str] = {}
    for key, port in ports.items():
        if port and port in owners:
            return (
                f"{owners[port]} and {key} are both {port}: each lane has a socket of its own; "
                "give different ports, or 0 for any free one"
            )
        owners[port] = key
    return None


def _max_tokens(c: Config) -> str | None:
    tokens = c.sampling.max_tokens
    if tokens > TOKENS_MAX:
        return f"{tokens} exceeds the {TOKENS_MAX} tokens that a trajectory may hold; lower it"
    group_tokens = tokens * c.dispatch.group_size
    if group_tokens * 4 > GROUP_FRAME_MAX_BYTES:
        return (
            f"{tokens} tokens for each of dispatch.group_size {c.dispatch.group_size} may need a "
            f"frame of {group_tokens * 4} bytes, and one carries {GROUP_FRAME_MAX_BYTES}; lower "
            "one of the two"
        )
    if group_tokens * _TOKEN_BYTES > c.net.rollout_bytes_in_flight:
        return (
            f"{tokens} tokens for each of dispatch.group_size {c.dispatch.group_size} make a group "
            f"of up to {group_tokens * _TOKEN_BYTES} bytes, above net.rollout_bytes_in_flight "
            f"{c.net.rollout_bytes_in_flight}: raise that, or lower one of the two"
        )
    return None


def _eval_tasks(c: Config) -> str | None:
    if not c.eval.every_steps or c.eval.num_tasks <= EVAL_TASKS_MAX:
        return None
    return f"{c.eval.num_tasks} exceeds the {EVAL_TASKS_MAX} tasks that one eval may hold; lower it"


def _updates(c: Config) -> str | None:
    if c.learner.updates_per_step <= c.learner.groups_per_step:
        return None
    return (
        f"{c.learner.updates_per_step} exceeds learner.groups_per_step "
        f"{c.learner.groups_per_step}: each update needs at least one group of its own"
    )


def _model_compute(c: Config) -> str | None:
    if c.model.compute_dtype == "bfloat16" and c.model.dtype == "float32":
        return (
            '"bfloat16" needs model.dtype = "bfloat16": nobody computes with more of the weights '
            'than that; set it, or leave compute at "auto"'
        )
    if c.model.compute_dtype != c.model.dtype and c.learner.ranks > 1:
        return (
            f'"{c.model.compute}" with {c.model.dtype} weights needs learner.ranks = 1, not '
            f'{c.learner.ranks}: shards are not rounded; set it to "auto"'
        )
    return None


def _learner_dtype(c: Config) -> str | None:
    if c.learner.dtype == "float32":
        return None
    if c.model.dtype != "bfloat16":
        return (
            f'"{c.learner.dtype}" needs model.dtype = "bfloat16", not "{c.model.dtype}": workers '
            "would sample with other weights than those that compute in the learner; set "
            'model.dtype = "bfloat16", or learner.dtype = "float32"'
        )
    if c.model.compute_dtype != "bfloat16":
        return (
            f'"{c.learner.dtype}" is less than model.compute = "{c.model.compute}", in which '
            'workers compute; set learner.dtype = "float32", or model.compute = "auto"'
        )
    return None


def _learning_rate_min(c: Config) -> str | None:
    if c.learner.learning_rate_min <= c.learner.learning_rate:
        return None
    return (
        f"{c.learner.learning_rate_min:g} is above learner.learning_rate "
        f"{c.learner.learning_rate:g}: a schedule falls from that to this; lower it"
    )


def _ranks(c: Config) -> str | None:
    ranks = c.learner.ranks
    if ranks == 1:
        return None
    if c.learner.lora.rank:
        return (
            f"{ranks} with learner.lora.rank {c.learner.lora.rank}: adapters are trained by one "
            "process; set learner.ranks to 1, or learner.lora.rank to 0"
        )
    if re.fullmatch(r"cuda:\d+", c.learner.device):
        return (
            f'{ranks} with learner.device "{c.learner.device}": each rank has a device of its '
            'own; use "cuda" or "auto"'
        )
    return None


def _run_name(c: Config) -> str | None:
    if c.run.name not in (".", ".."):
        return None
    return f'"{c.run.name}" is no name of a folder inside run.dir; for example "run"'


def _worker_name(c: Config) -> str | None:
    name = c.worker.name
    if not name:
        return None
    if name.startswith(".") or re.fullmatch(r"(coordinator|origin|learner)(-.*)?", name):
        return (
            f'"{name}" begins with a dot or is the name of another part (coordinator, origin, '
            'learner); for example "w"'
        )
    longest = f"{name}-{c.workers.local}"
    if len(longest) > 64:
        return (
            f"the last local worker would be {longest}, of {len(longest)} characters; at most 64 "
            "are allowed, so give a shorter one"
        )
    return None


def _stall(c: Config) -> str | None:
    if c.dispatch.stall_s > c.heartbeat.interval_s:
        return None
    return (
        f"{c.dispatch.stall_s:g} is not above heartbeat.interval_s {c.heartbeat.interval_s:g}: "
        "a lease would be revoked before its worker can tell of a token; the default is 60"
    )


def _settings(c: Config) -> str | None:
    bad = _not_json(c.environment.settings, "environment.settings")
    if bad is None:
        return None
    return (
        f"{bad} cannot travel to the workers as JSON; allowed are text, finite numbers, true and "
        "false, arrays and tables (write a date as text)"
    )


def _not_json(value: Any, path: str) -> str | None:
    match value:
        case dict():
            found = (_not_json(item, f"{path}.{key}") for key, item in value.items())
        case list():
            found = (_not_json(item, f"{path}[{i}]") for i, item in enumerate(value))
        case float() if value != value or value in (float("inf"), float("-inf")):
            return f"{path} = {value}"
        case None | bool() | int() | float() | str():
            return None
        case _:
            return f"{path} = {value} ({type(value).__name__})"
    return next((text for text in found if text is not None), None)


RULES: Final = (
    Rule("staleness.period", ("staleness.period", "staleness.max"), _period),
    Rule("staleness.late", ("staleness.late", "worker.on_update"), _mask),
    Rule("dispatch.lead_steps", ("dispatch.lead_steps", "staleness.max"), _lead),
    Rule(
        "heartbeat",
        ("heartbeat.interval_s", "heartbeat.suspect_s", "heartbeat.gone_s"),
        _heartbeat,
    ),
    Rule("http.host", ("http.enabled", "http.host", "http.token"), _http_token),
    Rule("net.curve", ("net.curve", "net.host"), _curve),
    Rule("net.host", ("net.host",), _host),
    Rule(
        "net.coordinator",
        ("net.coordinator", "net.coordinator_rollouts", "net.coordinator_key", "net.curve"),
        _coordinator,
    ),
    Rule(
        "net",
        (
            "net.control_port",
            "net.rollouts_port",
            "net.origin_port",
            "net.join_port",
            "http.port",
            "http.host",
        ),
        _ports,
    ),
    Rule(
        "sampling.max_tokens",
        ("sampling.max_tokens", "dispatch.group_size", "net.rollout_bytes_in_flight"),
        _max_tokens,
    ),
    Rule("eval.num_tasks", ("eval.every_steps", "eval.num_tasks"), _eval_tasks),
    Rule(
        "learner.updates_per_step",
        ("learner.updates_per_step", "learner.groups_per_step"),
        _updates,
    ),
    Rule("learner.ranks", ("learner.ranks", "learner.lora.rank", "learner.device"), _ranks),
    Rule("model.compute", ("model.compute", "model.dtype", "learner.ranks"), _model_compute),
    Rule("learner.dtype", ("learner.dtype", "model.dtype", "model.compute"), _learner_dtype),
    Rule(
        "learner.learning_rate_min",
        ("learner.learning_rate_min", "learner.learning_rate"),
        _learning_rate_min,
    ),
    Rule("environment.settings", ("environment.settings",), _settings),
    Rule("run.name", ("run.name",), _run_name),
    Rule("worker.name", ("worker.name", "workers.local"), _worker_name),
    Rule("worker.vllm.engine_args", ("worker.vllm.engine_args",), engine_args_problem),
    Rule(
        "sampling.stop",
        ("sampling.stop", "sampling.stop_token_ids", "worker.engine"),
        stop_problem,
    ),
    Rule("audit.share", ("audit.share", "audit.workers", "environment.name"), audit_problem),
    Rule("offers", ("offers",), offer_names_problem),
    Rule("offers", ("offers",), offer_rates_problem),
    Rule("plan.staleness_min", ("plan.staleness_min", "plan.staleness_max"), plan_range_problem),
    Rule("provisioner", ("provisioner", "offers", "net.curve"), provisioner_problem),
    Rule("activation.policy", ("activation.policy", "provisioner", "offers"), activation_problem),
    Rule("simulation.workers", ("simulation.workers",), simulation_problem),
    Rule("dispatch.stall_s", ("dispatch.stall_s", "heartbeat.interval_s"), _stall),
)
