"""The ranks of one learner: processes that train one policy together, each with a share of it.

Rank 0 leads: it alone talks to the coordinator, decides and writes. The others follow: they
wait for its next order (train this batch, publish, save, end) and do their part of it. An
order is a small record in a store; what is big (a batch) follows as raw bytes. Nothing is
pickled.

Life-cycle: `join` (the process group is up) -> orders, each carried out by all ranks ->
"end". A rank that dies takes the others with it: rank 0 holds the store, a broken connection
ends every collective, and every wait has the deadline `learner.fsdp.timeout_s`; who started
the ranks ends the rest.

One process alone is `ALONE`: no process group, and every call the identity.

Letters: N elements of a vector, R ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from echo2 import wire
from echo2.config import LearnerTable
from echo2.errors import ConfigError, LearnerError

STORE_VARIABLE: Final = "ECHO2_STORE_FD"
"""Descriptor of a listening socket, inherited by rank 0, on which it serves the store."""
ORDER_BYTES_MAX: Final = 16 << 20
PAYLOAD_BYTES_MAX: Final = 8 << 30
COLLECTED_BYTES_MAX: Final = 64 << 20
"""Per rank, of one `collect`."""
END: Final = "end"
END_READ_S: Final = 30.0
FAILED_READ_S: Final = 3.0
"""After the end: time for the followers to read of it."""
BEAT_EVERY_S: Final = 2.0
LOOK_EVERY_S: Final = 20.0
"""A follower that waits for an order looks so often whether rank 0 still lives."""


class RankLostError(LearnerError):
    """Another rank of this learner ended, or was silent for too long."""


@dataclass(frozen=True, slots=True)
class Order:
    """What all ranks do next. `payload` are raw bytes of up to PAYLOAD_BYTES_MAX."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    payload: bytes | bytearray = b""


class Ranks:
    """One process alone. `rank` is 0 of `size` 1, and nothing is sent anywhere."""

    def __init__(self, *, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    def device(self, wanted: torch.device) -> torch.device:
        """The device of this rank, of the kind that the configuration wants."""
        return wanted

    def order(self, name: str, /, payload: bytes | bytearray = b"", **arguments: Any) -> None:
        """Tell the followers what comes next; rank 0 then does its own part of it."""

    def next_order(self) -> Order:
        """What rank 0 orders next."""
        raise LearnerError("a learner of one process gives itself no orders")

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in float64, the same on all."""
        return [float(value) for value in values]

    def joined(self, vector_N: Tensor) -> Tensor:
        """All ranks' vectors, one after the other in order of rank; lengths may differ."""
        return vector_N

    def collect(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank, on all ranks."""
        return [data]


ALONE: Final = Ranks()


class GroupRanks(Ranks):
    """One of several, or one that was started as a rank: member of a process group."""

    def __init__(
        self, *, rank: int, size: int, local_rank: int, orders: Store, timeout_s: float
    ) -> None:
        super().__init__(rank=rank, size=size)
        self.local_rank = local_rank
        self._orders = orders
        self._timeout_s = timeout_s
        self._count = 0

    def device(self, wanted: torch.device) -> torch.device:
        if wanted.type != "cuda":
            return wanted
        if wanted.index is not None:
            raise ConfigError(
                f'learner.device is "{wanted}", and this learner has {self.size} ranks: each has '
                'a device of its own; use "cuda" or "auto"'
            )
        if self.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {self.rank} would use cuda:{self.local_rank}, and this machine has "
                f"{torch.cuda.device_count()} CUDA devices; lower learner.ranks to that"
            )
        device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(device)
        return device

    def order(self, name: str, /, payload: bytes | bytearray = b"", **arguments: Any) -> None:
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise LearnerError(
                f'the order "{name}" would carry {len(payload)} bytes to the other ranks; at most '
                f"{PAYLOAD_BYTES_MAX} are allowed: lower learner.groups_per_step"
            )
        record = wire.pack([name, len(payload), arguments])
        if len(record) > ORDER_BYTES_MAX:
            raise LearnerError(
                f'the order "{name}" has {len(record)} bytes; at most {ORDER_BYTES_MAX} are allowed'
            )
        with _lost_is_told():
            self._orders.set(f"order/{self._count}", record)  # type: ignore[arg-type]
            if self._count >= 2:  # the last one was read by all: it held a collective
                self._orders.delete_key(f"order/{self._count - 2}")
            self._count += 1
            if payload:
                dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0)

    def next_order(self) -> Order:
        with _lost_is_told():
            record = self._waited(f"order/{self._count}")
            self._count += 1
            name, num_bytes, arguments = wire.unpack(record, max_bytes=ORDER_BYTES_MAX)
            if name == END:
                self._orders.set(f"ended/{self.rank}", "")
            if not num_bytes:
                return Order(name, arguments)
            if num_bytes > PAYLOAD_BYTES_MAX:
                raise LearnerError(f'the order "{name}" announces {num_bytes} bytes; refused')
            payload = bytearray(num_bytes)
            dist.broadcast(torch.frombuffer(payload, dtype=torch.uint8), src=0)
            return Order(name, arguments, payload)

    def end(self, timeout_s: float = END_READ_S) -> None:
        """Rank 0: tell the followers that it is the end, and wait until they have read it:
        the store ends with this process."""
        self.order(END)
        others = [f"ended/{rank}" for rank in range(1, self.size)]
        if others:
            with _lost_is_told():
                self._orders.wait(others, timedelta(seconds=timeout_s))

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        with _lost_is_told():
            sums = torch.tensor([float(value) for value in values], dtype=torch.float64)
            dist.all_reduce(sums)
            return [float(value) for value in sums]

    def joined(self, vector_N: Tensor) -> Tensor:
        with _lost_is_told():
            own = vector_N.detach().cpu().contiguous()
            lengths = self._lengths(own.numel())
            padded = torch.zeros(max(lengths), dtype=own.dtype)
            padded[: own.numel()] = own
            # Bytes, since gloo does not know every dtype.
            found = [torch.empty_like(padded).view(torch.uint8) for _ in lengths]
            dist.all_gather(found, padded.view(torch.uint8))
            parts = [
                part.view(own.dtype)[:length] for part, length in zip(found, lengths, strict=True)
            ]
            return torch.cat(parts).to(vector_N.device)

    def collect(self, data: bytes) -> list[bytes]:
        if len(data) > COLLECTED_BYTES_MAX:
            raise LearnerError(f"{len(data)} bytes exceed the {COLLECTED_BYTES_MAX} of a collect")
        own = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
        lengths = [len(data)] if self.size == 1 else self._lengths(len(data))
        joined = self.joined(own).numpy().tobytes()
        ends = torch.tensor(lengths).cumsum(0).tolist()
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def _lengths(self, length: int) -> list[int]:
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = length
        with _lost_is_told():
            dist.all_reduce(lengths)
        return [int(value) for value in lengths]

    def _waited(self, key: str) -> bytes:
        """The record, as soon as it is there; RankLostError when rank 0 no longer beats."""
        beat, heard = -1, time.monotonic()
        while True:
            try:
                self._orders.wait([key], timedelta(seconds=min(LOOK_EVERY_S, self._timeout_s)))
                return bytes(self._orders.get(key))
            except dist.DistNetworkError:
                raise
            except dist.DistStoreError:  # only its time was up
                now = time.monotonic()
                last, beat = beat, int(self._orders.add("beat", 0))
                if beat != last:
                    heard = now
                elif now - heard > self._timeout_s:
                    raise RankLostError(
                        f"rank 0 gave no sign of life for {now - heard:.0f} s "
                        "(learner.fsdp.timeout_s); this rank ends: go on with --resume"
                    ) from None


def started_as_rank() -> bool:
    """Whether a launcher (`echo2 learner`, torchrun) started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def join(table: LearnerTable) -> Iterator[Ranks]:
    """Become one of the ranks that the environment names; ALONE when it names none.

    ConfigError when it names another number of ranks than `learner.ranks`.
    """
    if not started_as_rank():
        if table.ranks > 1:
            raise ConfigError(
                f"learner.ranks is {table.ranks}, and this process was started alone; start it "
                f"with `echo2 learner`, or `torchrun --nproc-per-node {table.ranks} -m echo2 "
                "learner`"
            )
        yield ALONE
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if table.ranks not in (1, size):
        raise ConfigError(
            f"learner.ranks is {table.ranks}, and {size} ranks were started; set it to {size}, or "
            "leave it out"
        )
    timeout = timedelta(seconds=table.fsdp.timeout_s)
    store = _store(rank, size, timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # its store outlives an attempt
    kinds = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with _lost_is_told():
        dist.init_process_group(
            kinds,
            store=PrefixStore(f"echo2/{attempt}/group", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
    # A connection of its own: a wait for an order would hold up the process group's.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = f"echo2/{attempt}/orders"
    orders = PrefixStore(prefix, TCPStore(host, port, timeout=timeout))
    ranks = GroupRanks(
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        orders=orders,
        timeout_s=table.fsdp.timeout_s,
    )
    beat = _Beat(PrefixStore(prefix, TCPStore(host, port, timeout=timeout)))
    if ranks.is_lead and size > 1:
        beat.start()
    try:
        yield ranks
        if ranks.is_lead:
            ranks.end()
    except BaseException as error:
        if ranks.is_lead and not is_lost(error):
            with contextlib.suppress(RankLostError):  # they may have failed as this one did
                ranks.end(FAILED_READ_S)
        raise
    finally:
        beat.stop()
    dist.destroy_process_group()


class _Beat:
    """Rank 0 counts up in the store while it lives, also while it computes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-0-beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_EVERY_S):
            try:
                self._store.add("beat", 1)
            except RuntimeError:
                return  # the store is gone, and with it the learner


def _store(rank: int, size: int, timeout: timedelta) -> Store:
    """Served by rank 0, on the socket that it inherited if it did, or by torchrun."""
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = rank == 0 and not is_served
    handle = os.environ.pop(STORE_VARIABLE, None)
    with _lost_is_told():
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            is_master=is_server,
            timeout=timeout,
            master_listen_fd=int(handle) if is_server and handle is not None else None,
        )


@contextlib.contextmanager
def _lost_is_told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise RankLostError(
            "another rank of this learner ended or was silent for too long "
            f"({_first_line(error)}); this rank ends too: go on with --resume"
        ) from error


def is_lost(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone (gloo raises bare RuntimeErrors,
    which name its sources)."""
    return isinstance(error, RankLostError | dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].partition(". This is typically")[0][:300]
