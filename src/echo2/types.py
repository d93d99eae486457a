"""The nouns that every part shares: versions, spans, tasks, sampling settings.

Values are frozen and checked when made, so that a wrong one cannot travel. Nothing here
waits, sends, logs or tells time. Bounds of what a group's header holds stand twice, for pydantic
(`Field`) and for msgspec (`Meta`), which reads such headers: `echo2.wire_typed` demands that both
say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, NewType

from msgspec import Meta
from pydantic import FailFast, Field

PeerId = NewType("PeerId", str)
"""Who a message came from: the name under which the allow-list holds its verified key."""
GroupId = NewType("GroupId", str)
LeaseId = NewType("LeaseId", str)
Step = NewType("Step", int)

TASK_PAYLOAD_MAX_BYTES: Final = 1 << 20
GROUP_SIZE_MAX: Final = 1024
TOKENS_MAX: Final = 1 << 20
"""Longest trajectory in tokens."""

Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Position = Annotated[int, Field(strict=True, ge=-1, le=2**53)]
Mbit = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""Rates of links: 10⁶ bits per second."""
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False), Meta(ge=0, le=1e9)]
Real = Annotated[float, Field(allow_inf_nan=False)]
REWARD_MAX: Final = 1e30
Reward = Annotated[
    float,
    Field(ge=-REWARD_MAX, le=REWARD_MAX, allow_inf_nan=False),
    Meta(ge=-REWARD_MAX, le=REWARD_MAX),
]
"""So bounded that sums and squares of many stay finite."""
Name = Annotated[str, Field(strict=True, min_length=1, max_length=128, pattern=r"^[\w.:@+-]+$")]
Text = Annotated[str, Field(strict=True, max_length=2048)]
Digest = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{64}$")]
"""BLAKE3 of 32 bytes in lower-case hexadecimal."""
Endpoint = Annotated[str, Field(strict=True, max_length=256, pattern=r"^(tcp://[^\s*]+:\d+)?$")]
ServerKey = Annotated[str, Field(strict=True, max_length=40, pattern=r"^(.{40})?$")]
PublicKey = Annotated[
    str, Field(strict=True, pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$")
]
"""A CURVE key in z85."""
VersionNumber = Annotated[int, Field(strict=True, ge=0, le=2**31), Meta(ge=0, le=2**31)]
TokenCount = Annotated[int, Field(strict=True, ge=0, le=TOKENS_MAX), Meta(ge=0, le=TOKENS_MAX)]
TrajectoryLength = Annotated[
    int, Field(strict=True, ge=1, le=TOKENS_MAX), Meta(ge=1, le=TOKENS_MAX)
]
TurnCount = Annotated[int, Field(strict=True, ge=0, le=100_000), Meta(ge=0, le=100_000)]


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A policy version: `step` completed learner steps, seen from one `incarnation`.

    Ordered by (incarnation, step). The weights' digest belongs to it too and travels in
    the manifest.
    """

    incarnation: VersionNumber
    step: VersionNumber

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read the form that `str` writes, "incarnation.step". Raises ValueError."""
        incarnation, _, step = text.partition(".")
        return cls(int(incarnation), int(step))


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a trajectory were sampled by `version`."""

    version: Version
    start: TokenCount
    end: TokenCount


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a policy is sampled. `temperature` 0 is greedy; `max_tokens` bounds one turn.

    Behaviour logprobs describe the distribution after temperature; top-p truncation is not
    renormalised into them, and the learner computes its own in the same way.
    """

    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=TOKENS_MAX)] = 16


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt of a data set, as the environment reads it.

    `index` is its position in the run's stream of tasks (it grows over epochs); `payload`
    is JSON that only the environment understands.
    """

    index: Count
    payload: Annotated[str, Field(max_length=TASK_PAYLOAD_MAX_BYTES)]


@dataclass(frozen=True, slots=True)
class GroupMismatch:
    """How far the behaviour logprobs of a group are from the learner's, both at the version that
    sampled: mean |difference| in nats over the `num_tokens` that were compared."""

    group: Annotated[GroupId, Field(strict=True, min_length=1, max_length=64)]
    num_tokens: Annotated[int, Field(strict=True, ge=1, le=2**53)]
    diff_mean: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class RelayPeer:
    """A worker's relay: `endpoint` is where it accepts connections ("": it only dials), `key`
    the public CURVE key with which it listens and dials ("" without CURVE)."""

    name: Name
    endpoint: Endpoint
    key: ServerKey


@dataclass(frozen=True, slots=True)
class Stripe:
    """`num_chunks` of a version follow one relay tree: `sources` are the workers that send them
    to the receiver, the parent first, then its parent and so on; the origin stands behind the
    last. `helpers` have uplink to spare, by the plan: to them goes what a slow source loses.
    Which chunks they are says `echo2.core.dissemination.stripes`."""

    num_chunks: Annotated[int, Field(strict=True, ge=1, le=2**32)]
    sources: Annotated[tuple[Name, ...], Field(max_length=64)] = ()
    helpers: Annotated[tuple[Name, ...], Field(max_length=4)] = ()


@dataclass(frozen=True, slots=True)
class DeltaOffer:
    """A delta that makes a version out of `base` (both named by their manifests): its own
    manifest's digest, and what it costs on the wire."""

    base: Digest
    manifest_digest: Digest
    num_bytes: Count


@dataclass(frozen=True, slots=True)
class BroadcastWorker:
    """A worker that was active when a version was published. `seconds` from then until it had
    installed it, null before that; `fetch_s` and `install_s` are parts of it. `problem`: why it
    has not, as it told last. `is_here` False: it left without it."""

    name: Name
    seconds: Seconds | None = None
    fetch_s: Seconds = 0.0
    install_s: Seconds = 0.0
    problem: Annotated[str, Field(max_length=500)] = ""
    is_here: bool = True


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What came over one link for one version: `seconds` is the time in which something was
    owed by `peer` ("origin": the origin), `num_faults` counts payloads that were not the chunk
    asked for, `silences` how often it was taken for dead."""

    peer: Name
    num_bytes: Count
    seconds: Seconds
    num_faults: Count = 0
    silences: Count = 0


@dataclass(frozen=True, slots=True)
class TrajectoryHeader:
    """What the coordinator needs to know of one trajectory; its tokens travel as frames.

    `length` counts all tokens (prompt, turns, observations), `prompt_length` those before
    the first sampled one, `num_sampled` those with loss_mask 1. `spans` cover the sampled
    tokens in order, each within [0, length), none overlapping.
    """

    length: TrajectoryLength
    prompt_length: TokenCount
    num_sampled: TokenCount
    reward: Reward
    finish: Literal["stop", "length", "abort", "environment"]
    num_turns: TurnCount
    spans: Annotated[
        tuple[Span, ...],
        Field(min_length=1, max_length=256),
        Meta(min_length=1, max_length=256),
        FailFast(),
    ]

    @property
    def min_version(self) -> Version:
        return min(span.version for span in self.spans)

    @property
    def max_version(self) -> Version:
        return max(span.version for span in self.spans)
