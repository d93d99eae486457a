"""THE protocol: every message between coordinator, learner, workers and origin.

A message is a frozen dataclass, validated when it is made and again when it is received.
`echo2.wire` turns it into frames: a MessagePack header, then one raw frame for each field
marked `Frame`, in the order of the class. `docs/protocol.md` is generated from this module.

Lanes never queue behind each other: CONTROL (small, latency matters), ROLLOUTS (groups, up
to megabytes), CHUNKS (weights). ENROLMENT is for those who have a join token and no name yet.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass as _stdlib_dataclass
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Final, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta
from pydantic import ConfigDict, FailFast, Field
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

from echo2.types import (
    GROUP_SIZE_MAX,
    BroadcastWorker,
    Count,
    DeltaOffer,
    Digest,
    Endpoint,
    GroupId,
    GroupMismatch,
    LeaseId,
    LinkReport,
    Mbit,
    Name,
    PublicKey,
    Real,
    RelayPeer,
    Reward,
    Sampling,
    Seconds,
    ServerKey,
    Stripe,
    Task,
    Text,
    TrajectoryHeader,
    Version,
)

PROTOCOL: Final = 3
HEADER_MAX_BYTES: Final = 4 << 20
CHUNK_MAX_BYTES: Final = 256 << 10
GROUP_FRAME_MAX_BYTES: Final = 256 << 20
MANIFEST_MAX_BYTES: Final = 64 << 20
LEASES_PER_PEER_MAX: Final = 4096
RELAY_PEERS_MAX: Final = 4096
STRIPES_MAX: Final = 256
DELTA_PATH_MAX: Final = 16
STORED_MAX: Final = 8
WORKERS_MAX: Final = 10_000
MISMATCHES_MAX: Final = 4096
JOIN_SETTINGS_MAX: Final = 256 << 10


class Lane(enum.StrEnum):
    CONTROL = "control"
    ROLLOUTS = "rollouts"
    CHUNKS = "chunks"
    ENROLMENT = "enrolment"


class Role(enum.StrEnum):
    WORKER = "worker"
    LEARNER = "learner"
    ORIGIN = "origin"
    COORDINATOR = "coordinator"


@_stdlib_dataclass(frozen=True, slots=True)
class Frame:
    """Marks a bytes field that travels as a raw frame of at most `max_bytes`."""

    max_bytes: int


MESSAGES: dict[str, type[Message]] = {}
"""Every message by its name on the wire (the class name)."""


class Message:
    """Base of all messages. Class keywords name lane, sender and receiver. `HANDED_ON`: whoever
    receives it stores it or sends its fields on, so that its header is kept as it came. Such a one
    is large and comes often: it is read as `echo2.wire_typed` says."""

    LANE: ClassVar[Lane]
    SENDERS: ClassVar[frozenset[Role]]
    RECEIVERS: ClassVar[frozenset[Role]]
    HANDED_ON: ClassVar[bool] = False


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(lane: Lane, senders: str, receivers: str) -> Any:
    """Register a message of `lane`, sent by `senders` to `receivers` (roles, by space)."""

    def register(cls: type) -> type:
        made: Any = dataclass(
            frozen=True,
            kw_only=True,
            config=ConfigDict(extra="forbid", defer_build=True),
        )(cls)
        made.LANE = lane
        made.SENDERS = frozenset(Role(role) for role in senders.split())
        made.RECEIVERS = frozenset(Role(role) for role in receivers.split())
        MESSAGES[made.__name__] = made
        return made  # type: ignore[no-any-return]  # the class itself, with fields

    return register


def frame_fields(cls: type[Message]) -> tuple[tuple[str, int], ...]:
    """(field name, largest size in bytes) of each raw frame of a message, in wire order."""
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for field in fields(cls):  # type: ignore[arg-type]
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            for extra in get_args(hint)[1:]:
                if isinstance(extra, Frame):
                    found.append((field.name, extra.max_bytes))
    return tuple(found)


_C, _R, _B, _E = Lane.CONTROL, Lane.ROLLOUTS, Lane.CHUNKS, Lane.ENROLMENT
TokenFrame = Annotated[bytes, Frame(GROUP_FRAME_MAX_BYTES)]
SmallFrame = Annotated[bytes, Frame(1 << 20)]
LeaseKind = Literal["train", "eval"]
LeaseName = Annotated[
    LeaseId, Field(strict=True, min_length=1, max_length=64), Meta(min_length=1, max_length=64)
]
GroupName = Annotated[
    GroupId, Field(strict=True, min_length=1, max_length=64), Meta(min_length=1, max_length=64)
]

# ---------------------------------------------------------------- worker <-> coordinator


@message(_C, "worker", "coordinator")
class WorkerHello(Message):
    """First message of a worker. Another protocol is refused with both numbers.

    `relay_endpoint` and `relay_key`: where its relay listens, if it does, and the key that
    other relays know it by; `uplink_mbit`: its own cap of what it forwards, 0 without one;
    `downlink_mbit`: what its line can receive, 0 where it does not know.
    `slots`: groups that it works on at once. `held`: leases that it still works on after a
    reconnect, reclaimed if they are still alive. `installed`: the version that it serves;
    `stored`, while it serves none: manifests of versions on its disk, from which deltas lead on.
    `replays`: its environment can play a transcript again, so that it could audit others; whether
    it may is the operator's word alone.
    """

    protocol: Annotated[int, Field(ge=0, le=2**31)]
    echo2_version: Text
    name: Name
    run_id: Annotated[str, Field(max_length=64)] = ""
    engine: Name
    precision: Name
    on_update: Literal["continue", "finish", "abort"]
    environment: Text
    environment_version: Text = ""
    slots: Annotated[int, Field(ge=1, le=LEASES_PER_PEER_MAX)]
    price_usd_per_h: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    standby_usd_per_h: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    held: Annotated[tuple[LeaseName, ...], Field(max_length=LEASES_PER_PEER_MAX)] = ()
    installed: Version | None = None
    stored: Annotated[tuple[Digest, ...], Field(max_length=STORED_MAX)] = ()
    relay_endpoint: Endpoint = ""
    relay_key: ServerKey = ""
    uplink_mbit: Mbit = 0.0
    downlink_mbit: Mbit = 0.0
    replays: bool = False


@message(_C, "coordinator", "worker")
class WorkerWelcome(Message):
    """The hello was accepted. `assets_digest` names the manifest of tokenizer and model
    configuration at the origin ("" when the engine needs none). `settings` is JSON of the
    run's [environment] table. `alive` lists the held leases that go on."""

    protocol: Annotated[int, Field(ge=0, le=2**31)]
    run_id: Annotated[str, Field(max_length=64)]
    worker: Name
    heartbeat_interval_s: Seconds
    silence_max_s: Seconds
    environment: Text
    settings: Annotated[str, Field(max_length=1 << 20)] = "{}"
    assets_digest: Annotated[str, Field(max_length=64)] = ""
    origin: Endpoint = ""
    origin_key: ServerKey = ""
    alive: Annotated[tuple[LeaseName, ...], Field(max_length=LEASES_PER_PEER_MAX)] = ()


@message(_C, "coordinator", "worker learner")
class Refused(Message):
    """The coordinator will not work with this peer, or not with its last message."""

    reason: Name
    text: Text
    fatal: bool


@message(_C, "worker", "coordinator")
class Heartbeat(Message):
    """Sign of life. `lease_tokens`: tokens sampled so far for each live lease."""

    sequence: Count
    state: Name
    lease_tokens: Annotated[dict[LeaseName, Count], Field(max_length=LEASES_PER_PEER_MAX)]
    tokens_per_s: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] = 0.0
    loop_lag_s: Seconds = 0.0


@message(_C, "coordinator", "worker learner")
class HeartbeatEcho(Message):
    sequence: Count


@message(_C, "coordinator", "worker")
class VersionAnnounced(Message):
    """A version was published: fetch its manifest (`manifest_digest`) and chunks from
    `origin`, install it, and check the probe. The frames are `probe_tokens` int32
    [num_probes x probe_length] and `probe_logprobs` float32 of the same shape, where
    column 0 is 0 (the first token is given). Empty when the publisher has no model.

    `path` names what to fetch instead of the version itself, deltas to apply one after the
    other to what is here; what fails with it is fetched whole. `stripes` and `num_bytes` are
    those of its last part then.

    `stripes` is the worker's part of the relay plan: from whom which chunks come; without any
    all come from the origin. `planned_s` is how long the plan takes in all. `serves` are the
    workers below it that cannot dial it, so that it has to dial them."""

    version: Version
    manifest_digest: Digest
    num_bytes: Count
    origin: Endpoint
    origin_key: ServerKey
    assets_digest: Annotated[str, Field(max_length=64)] = ""
    path: Annotated[tuple[Digest, ...], Field(max_length=DELTA_PATH_MAX)] = ()
    stripes: Annotated[tuple[Stripe, ...], Field(max_length=STRIPES_MAX)] = ()
    serves: Annotated[tuple[Name, ...], Field(max_length=RELAY_PEERS_MAX)] = ()
    planned_s: Seconds = 0.0
    probe_length: Annotated[int, Field(ge=0, le=8192)] = 0
    probe_tokens: SmallFrame = b""
    probe_logprobs: SmallFrame = b""


@message(_C, "coordinator", "worker")
class RelayPeers(Message):
    """All workers whose relays may be talked to, the receiver among them; whoever is in no
    newer list is talked to no more."""

    peers: Annotated[tuple[RelayPeer, ...], Field(max_length=RELAY_PEERS_MAX)]


@message(_C, "worker", "coordinator")
class RelayReport(Message):
    """How a fetch goes, every few seconds and at its end: what came over each link since it
    began, and how many chunks are missing still."""

    manifest_digest: Digest
    num_chunks: Count
    num_missing: Count
    links: Annotated[tuple[LinkReport, ...], Field(max_length=RELAY_PEERS_MAX), FailFast()]


@message(_C, "worker", "coordinator")
class VersionInstalled(Message):
    """The version serves from now on. `canary_diff`: mean |logprob difference| on the
    probe; null when there was no probe. Leases follow only after this. `past`: it served before
    the connection was lost, and this may not have arrived; for the record alone."""

    version: Version
    manifest_digest: Digest
    fetch_s: Seconds
    install_s: Seconds
    pause_s: Seconds
    canary_diff: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None = None
    past: bool = False


@message(_C, "worker", "coordinator")
class InstallFailed(Message):
    """Fetch, install or canary failed; the version before goes on serving if `serving`."""

    version: Version
    stage: Literal["fetch", "install", "canary"]
    text: Text
    serving: Version | None = None


@message(_C, "coordinator", "worker")
class LeaseGranted(Message):
    """Generate one group. `version`: what the coordinator believes is installed; an eval
    is pinned to it (the worker must not flip before its evals end or `hold_s` is over).
    `revoke_after_s`: the lease is dead this long after it was granted."""

    lease: LeaseName
    group: GroupName
    attempt: Annotated[int, Field(ge=1, le=1000)]
    kind: LeaseKind
    version: Version
    task: Task
    group_size: Annotated[int, Field(ge=1, le=GROUP_SIZE_MAX)]
    sampling: Sampling
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)]
    revoke_after_s: Seconds
    hold_s: Seconds = 0.0


@message(_C, "coordinator", "worker")
class LeaseRevoked(Message):
    lease: LeaseName
    reason: Text


@message(_R, "worker", "coordinator")
class LeaseFailed(Message):
    """The worker cannot deliver this lease. `stage` says whose fault it is: a task's own
    (environment, reward) counts against the group, the worker's (engine, draining, lost)
    only against its attempts."""

    lease: LeaseName
    group: GroupName
    stage: Literal["environment", "engine", "draining", "lost"]
    text: Text


@message(_R, "worker", "coordinator")
class GroupResult(Message):
    """A finished group, sent until acknowledged. Frames hold the trajectories one after
    the other: `token_ids` int32, `logprobs` float32 (0 where the mask is 0), `loss_mask`
    uint8 (1 where the policy sampled the token)."""

    HANDED_ON: ClassVar[bool] = True

    lease: LeaseName
    group: GroupName
    attempt: Annotated[int, Field(ge=1, le=1000), Meta(ge=1, le=1000)]
    trajectories: Annotated[
        tuple[TrajectoryHeader, ...],
        Field(min_length=1, max_length=GROUP_SIZE_MAX),
        Meta(min_length=1, max_length=GROUP_SIZE_MAX),
        FailFast(),
    ]
    generate_s: Seconds
    environment_s: Seconds
    token_ids: TokenFrame
    logprobs: TokenFrame
    loss_mask: TokenFrame

    def __post_init__(self) -> None:
        total = sum(header.length for header in self.trajectories)
        for name, unit in (("token_ids", 4), ("logprobs", 4), ("loss_mask", 1)):
            size = len(getattr(self, name))
            if size != total * unit:
                raise ValueError(
                    f"frame {name} has {size} bytes; {total} tokens need {total * unit}"
                )
        for header in self.trajectories:
            end = 0
            for span in header.spans:
                if not end <= span.start < span.end <= header.length:
                    raise ValueError(
                        f"span [{span.start}, {span.end}) is empty, overlaps the one before it "
                        f"or leaves a trajectory of {header.length} tokens"
                    )
                end = span.end


@message(_R, "coordinator", "worker")
class GroupAcknowledged(Message):
    """The result is settled (durably) or not wanted; stop sending it."""

    group: GroupName
    lease: LeaseName
    outcome: Literal["accepted", "duplicate", "superseded", "refused"]
    reason: Text = ""


@message(_R, "coordinator", "worker")
class AuditOrdered(Message):
    """Recompute the rewards of a group that another worker sampled under `lease`: play the task
    again, and answer each turn with the tokens that are here. Frames as in GroupResult; the
    rewards in the headers are what that worker claims. Ordered again until it is answered."""

    lease: LeaseName
    group: GroupName
    task: Task
    sampling: Sampling
    trajectories: Annotated[
        tuple[TrajectoryHeader, ...], Field(min_length=1, max_length=GROUP_SIZE_MAX)
    ]
    token_ids: TokenFrame
    loss_mask: TokenFrame


@message(_R, "worker", "coordinator")
class AuditDone(Message):
    """The recomputed rewards, in the order of the trajectories. With a `problem` there are none:
    the environment does not make this transcript, whatever the policy says."""

    lease: LeaseName
    group: GroupName
    rewards: Annotated[tuple[Reward, ...], Field(max_length=GROUP_SIZE_MAX)] = ()
    problem: Text = ""


@message(_R, "worker", "coordinator")
class AuditFailed(Message):
    """The auditor cannot say: its environment failed, or it leaves."""

    lease: LeaseName
    group: GroupName
    text: Text


@message(_R, "worker learner", "coordinator")
class LaneOpened(Message):
    """First message of a peer in the rollouts lane: a ROUTER can answer only those that it
    has heard. Sent at the start and after each welcome."""


@message(_C, "worker learner", "coordinator")
class Draining(Message):
    """No new leases, please: this peer is about to leave."""

    reason: Text


@message(_C, "worker learner", "coordinator")
class Goodbye(Message):
    """This peer leaves now. A learner names its `incarnation` (0: none yet) and says whether
    the run is `finished`; that of a fenced one counts for nothing. `missing_steps`: how many steps
    of the run were not done, since the tasks were used up; it is over then, and has failed."""

    reason: Text
    finished: bool = False
    incarnation: Count = 0
    missing_steps: Count = 0


@message(_C, "coordinator", "worker learner")
class Shutdown(Message):
    """The run is over (or the coordinator stops): end cleanly."""

    reason: Text
    finished: bool


# --------------------------------------------------- a machine with a join token <-> coordinator


@message(_E, "worker", "coordinator")
class Enrol(Message):
    """Let the holder of `public_key` in as a worker. The connection's own key is the token's;
    the secret of this one stays where it was made. `name` is a wish, "" for none. Sent until it
    is answered: a key that is in already gets the same answer and uses up nothing."""

    protocol: Annotated[int, Field(ge=0, le=2**31)]
    echo2_version: Text
    public_key: PublicKey
    name: Annotated[
        str, Field(strict=True, max_length=64, pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]*)?$")
    ] = ""


@message(_E, "coordinator", "worker")
class Enrolled(Message):
    """The key is on the allow-list, as `name`, durably: say hello at `control` and `rollouts`,
    where `server_key` answers. `settings` is JSON of those settings of the run that its workers
    share, "table.key" to value (`echo2.join_settings`); data, never code."""

    protocol: Annotated[int, Field(ge=0, le=2**31)]
    name: Name
    run_id: Annotated[str, Field(max_length=64)]
    control: Endpoint
    rollouts: Endpoint
    server_key: PublicKey
    settings: Annotated[str, Field(max_length=JOIN_SETTINGS_MAX)]


@message(_E, "coordinator", "worker")
class EnrolRefused(Message):
    """The key is not let in. `reason`: token_unknown, token_expired, token_used_up, name_taken,
    key_taken, revoked, protocol, busy or unavailable; only the last two are worth another try."""

    reason: Name
    text: Text


# --------------------------------------------------------------- learner <-> coordinator


@message(_C, "learner", "coordinator")
class LearnerHello(Message):
    """First message of a learner. It resumes at `resume_step` (0: from the start), with
    weights of `digest` ("" if not known); `checkpoint_steps` are those it keeps.
    `incarnation` 0 asks for a new one; a reconnect names the one it holds, with
    `resume_step` the v that it believes in. `hello_id` tells a repeated hello from a new one.
    A `guest` publishes and trains nothing: it gets the seat only while no learner is in it, and
    v stays what it is, whatever its `resume_step`."""

    protocol: Annotated[int, Field(ge=0, le=2**31)]
    echo2_version: Text
    name: Name
    run_id: Annotated[str, Field(max_length=64)] = ""
    incarnation: Count = 0
    resume_step: Count
    digest: Annotated[str, Field(max_length=64)] = ""
    checkpoint_steps: Annotated[tuple[Count, ...], Field(max_length=4096)] = ()
    environment_version: Text = ""
    hello_id: Annotated[str, Field(max_length=64)] = ""
    guest: bool = False


@message(_C, "coordinator", "learner")
class LearnerWelcome(Message):
    """The learner is `incarnation`; v is `step`. Everything it sends from now on names it."""

    protocol: Annotated[int, Field(ge=0, le=2**31)]
    run_id: Annotated[str, Field(max_length=64)]
    incarnation: Count
    step: Count
    heartbeat_interval_s: Seconds
    silence_max_s: Seconds


@message(_C, "coordinator", "learner")
class Fenced(Message):
    """A higher incarnation exists; this learner may neither complete nor publish."""

    incarnation: Count
    by: Count


@message(_C, "learner", "coordinator")
class LearnerHeartbeat(Message):
    incarnation: Count
    sequence: Count
    state: Text


@message(_C, "coordinator", "learner")
class TasksWanted(Message):
    """Send tasks [start, start + count) of the data set's stream."""

    incarnation: Count
    start: Count
    count: Annotated[int, Field(ge=1, le=4096)]


@message(_C, "learner", "coordinator")
class TasksSubmitted(Message):
    """Tasks in order of index. `exhausted`: there is none at or after the last index + 1
    (or at `start`, when `tasks` is empty)."""

    incarnation: Count
    start: Count
    tasks: Annotated[tuple[Task, ...], Field(max_length=4096)]
    exhausted: bool = False


@message(_C, "learner", "coordinator")
class BatchRequest(Message):
    """The learner waits for the batch that it will train at version `step`."""

    incarnation: Count
    step: Count


@message(_C, "coordinator", "learner")
class BatchWaiting(Message):
    """Why there is no batch yet; sent on change, at most once a second."""

    incarnation: Count
    step: Count
    text: Text


@message(_C, "coordinator", "learner")
class BatchGranted(Message):
    """The batch of `step`: its groups follow in the rollouts lane. Tokens whose version is
    below `loss_from_step` (step - S) leave the loss (`late = "mask"`); under the other
    policies there are none. `last`: the task stream is exhausted and this is the end.
    `t_bcast_s`: publication until 0.9 of the workers had installed it, of the newest version of
    which that is known; `install_pause_s`: how long installs let engines stand still lately."""

    incarnation: Count
    step: Count
    loss_from_step: Count
    groups: Annotated[tuple[GroupName, ...], Field(max_length=65536)]
    last: bool
    workers_ready: Count = 0
    groups_leased: Count = 0
    groups_buffered: Count = 0
    groups_expired: Count = 0
    groups_failed: Count = 0
    groups_filtered: Count = 0
    tokens_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    cost_usd: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    t_bcast_s: Seconds | None = None
    install_pause_s: Seconds | None = None


@message(_R, "coordinator", "learner")
class BatchGroup(Message):
    """One group of a granted batch: frames as the worker sent them."""

    incarnation: Count
    step: Count
    group: GroupName
    worker: Name
    task: Task
    trajectories: Annotated[
        tuple[TrajectoryHeader, ...], Field(min_length=1, max_length=GROUP_SIZE_MAX)
    ]
    token_ids: TokenFrame
    logprobs: TokenFrame
    loss_mask: TokenFrame


@message(_C, "learner", "coordinator")
class StepCompleted(Message):
    """The batch of `step` was applied: v becomes step + 1. Idempotent. Sent until
    acknowledged. `groups`: what was trained, which a coordinator that was started again knows
    from its ledger. `mismatch`: of the groups whose behaviour logprobs were recomputed with the
    version that sampled them, how far they are from the learner's."""

    incarnation: Count
    step: Count
    groups: Annotated[tuple[GroupName, ...], Field(min_length=1, max_length=65536)]
    train_s: Seconds
    wait_s: Seconds
    mismatch: Annotated[tuple[GroupMismatch, ...], Field(max_length=MISMATCHES_MAX)] = ()


@message(_C, "coordinator", "learner")
class StepAcknowledged(Message):
    """v is `step` now, durably."""

    incarnation: Count
    step: Count


@message(_C, "learner", "coordinator")
class VersionPublished(Message):
    """The origin serves `version` (its step is v). Frames as in VersionAnnounced. `final`:
    the last of the run, for which the period κ need not have passed. `vocab_size`: token
    ids are below it; 0 when the publisher has no model. `deltas`: what else leads to it.
    """

    version: Version
    manifest_digest: Digest
    assets_digest: Annotated[str, Field(max_length=64)]
    num_bytes: Count
    origin: Endpoint
    origin_key: ServerKey
    final: bool = False
    vocab_size: Count = 0
    deltas: Annotated[tuple[DeltaOffer, ...], Field(max_length=DELTA_PATH_MAX)] = ()
    probe_length: Annotated[int, Field(ge=0, le=8192)] = 0
    probe_tokens: SmallFrame = b""
    probe_logprobs: SmallFrame = b""


@message(_C, "coordinator", "learner")
class PublishAcknowledged(Message):
    """The version is announced. Versions below `keep_from` may leave the origin: no worker
    serves one and no admissible rollout needs one."""

    version: Version
    keep_from: Count


@message(_C, "learner", "coordinator")
class BroadcastRequest(Message):
    """How far has the newest version come?"""

    incarnation: Count


@message(_C, "coordinator", "learner")
class BroadcastStatus(Message):
    """`num_active` workers are here, neither silent nor draining. `workers`: those that were
    when `version`, the newest, was published; null before the first."""

    incarnation: Count
    version: Version | None
    num_active: Count
    workers: Annotated[tuple[BroadcastWorker, ...], Field(max_length=WORKERS_MAX)]


@message(_C, "learner", "coordinator")
class CheckpointSaved(Message):
    """A checkpoint of `step` is complete on disk; `kept` are all that remain."""

    incarnation: Count
    step: Count
    kept: Annotated[tuple[Count, ...], Field(max_length=4096)]


@message(_C, "learner", "coordinator")
class EvalRequest(Message):
    """Evaluate a published version on held-out tasks; `eval_id` names the answer."""

    incarnation: Count
    eval_id: Name
    version: Version
    tasks: Annotated[tuple[Task, ...], Field(min_length=1, max_length=65536)]
    sampling: Sampling
    group_size: Annotated[int, Field(ge=1, le=GROUP_SIZE_MAX)] = 1


@message(_C, "coordinator", "learner")
class EvalResult(Message):
    """`num_done` of `num_asked` evals ended; `reward_mean` over those, null if none."""

    incarnation: Count
    eval_id: Name
    version: Version
    num_asked: Count
    num_done: Count
    reward_mean: Real | None
    tokens_mean: Real | None
    reason: Text = ""


# ---------------------------------------- relay <-> relay; the origin is one that only serves


@message(_B, "worker", "origin worker")
class ManifestRequest(Message):
    manifest_digest: Digest


@message(_B, "origin worker", "worker")
class ManifestReply(Message):
    """`manifest` is the manifest's encoded bytes; their BLAKE3 is `manifest_digest`."""

    manifest_digest: Digest
    manifest: Annotated[bytes, Frame(MANIFEST_MAX_BYTES)]


@message(_B, "worker", "origin worker")
class ChunksRequest(Message):
    """Send these chunks, each as soon as you have verified it; each index asked for is one
    credit of the receiver."""

    manifest_digest: Digest
    indexes: Annotated[tuple[Count, ...], Field(min_length=1, max_length=256)]


@message(_B, "worker", "origin worker")
class ChunksCancelled(Message):
    """These chunks are wanted from you no more; without any: none of this version."""

    manifest_digest: Digest
    indexes: Annotated[tuple[Count, ...], Field(max_length=256)] = ()


@message(_B, "origin worker", "worker")
class RelayAlive(Message):
    """A sign of life to a peer that is owed chunks: `num_held` of them wait for the link,
    `num_awaited` are not here yet themselves."""

    manifest_digest: Digest
    num_held: Count
    num_awaited: Count


@message(_B, "origin worker", "worker")
class Chunk(Message):
    manifest_digest: Digest
    index: Count
    payload: Annotated[bytes, Frame(CHUNK_MAX_BYTES)]


@message(_B, "origin worker", "worker")
class ChunksRefused(Message):
    """The sender does not hold this version, nor is it fetching it."""

    manifest_digest: Digest
    reason: Text
