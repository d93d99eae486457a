"""The hosts that benchmarks and fault tests run on: set up, reached, cut, mended, removed."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 60.0
LOST_S = 1.0
"""A connection that is not there after this, to a host that is cut, counts as lost."""

SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 0), backlog=16)
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"here")
    connection.close()
"""
CALL = """
import socket, sys
host, port, timeout_s = sys.argv[1:]
try:
    with socket.create_connection((host, int(port)), float(timeout_s)) as connection:
        print(connection.recv(4).decode())
except TimeoutError:
    print("lost")
"""
HEAR = """
import socket, sys
heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
heard.bind((sys.argv[1], 0))
print(heard.getsockname()[1], flush=True)
while True:
    print(heard.recv(100).decode(), flush=True)
"""
SAY = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(
    sys.argv[3].encode(), (sys.argv[1], int(sys.argv[2])))
"""
PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
OWN = """
import signal, sys
from wan import HostLink, Wan
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has none
with Wan([HostLink("a", 10, 10)]) as wan:
    sleeper = wan.popen("a", ["sh", "-c", "echo; exec sleep 600"], stdout=-1)
    sleeper.stdout.readline()
    print(sleeper.pid, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def benchmarks_imported() -> Iterator[list[Any]]:
    names = ("wan", "wan_netns", "wan_router", "broadcast")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(BENCHMARKS))


with benchmarks_imported() as modules:
    wan_module, namespaces, router, broadcast = modules
HostLink, Wan = wan_module.HostLink, wan_module.Wan

MISSING = wan_module.absent()
WHY = "; ".join(f"{part}: {why}" for part, why in MISSING.items())
needs_hosts = pytest.mark.skipif(bool(MISSING.keys() - {"tun"}), reason=f"no hosts here: {WHY}")
needs_tun = pytest.mark.skipif(bool(MISSING), reason=f"no router here: {WHY}")


def two_hosts(delay_s: float = 0.0) -> Any:
    return Wan([HostLink("a", 100, 100, delay_s), HostLink("b", 100, 100, delay_s)])


def a_server(wan: Any, host: str) -> int:
    """Its port."""
    argv = [sys.executable, "-c", SERVE, wan.address(host)]
    process = wan.popen(host, argv, stdout=subprocess.PIPE, text=True)
    return int(process.stdout.readline())


def called(wan: Any, host: str, target: str, port: int, *, timeout_s: float = DEADLINE_S) -> str:
    argv = [sys.executable, "-c", CALL, wan.address(target), str(port), str(timeout_s)]
    process = wan.popen(host, argv, stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=DEADLINE_S + 10)
    return str(said).strip()


def until(happened: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen in {DEADLINE_S:g} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "delay_s",
    [
        pytest.param(0.0, marks=needs_hosts, id="bridge"),
        pytest.param(0.002, marks=needs_tun, id="router"),
    ],
)
def test_a_host_is_reached_until_it_is_cut_and_again_when_it_is_mended(delay_s: float) -> None:
    with two_hosts(delay_s) as wan:
        port = a_server(wan, "b")
        assert called(wan, "a", "b", port) == "here"
        wan.cut("b")
        assert called(wan, "a", "b", port, timeout_s=LOST_S) == "lost"
        wan.mend("b")
        assert called(wan, "a", "b", port) == "here"
        assert not can_connect(wan.address("b"), port), "the machine itself sees the hosts"


@needs_hosts
@pytest.mark.parametrize("way", ["in", "out"])
def test_a_host_is_cut_one_way(way: str) -> None:
    with two_hosts() as wan:
        listener = wan.popen("b", [sys.executable, "-c", HEAR, wan.address("b")], **PIPED)
        port = int(listener.stdout.readline())
        say = partial(said_to, wan, "a", wan.address("b"), port)
        say("before")
        assert listener.stdout.readline() == "before\n"
        wan.cut("b", way)
        say("meanwhile")
        wan.mend("b")
        say("after")
        heard = listener.stdout.readline()
        assert heard == ("after\n" if way == "in" else "meanwhile\n")


def said_to(wan: Any, host: str, address: str, port: int, word: str) -> None:
    argv = [sys.executable, "-c", SAY, address, str(port), word]
    assert wan.popen(host, argv).wait(DEADLINE_S) == 0


def can_connect(address: str, port: int) -> bool:
    return subprocess.run(
        [sys.executable, "-c", CALL, address, str(port), str(LOST_S)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.startswith("here")


@needs_hosts
def test_an_uplink_changes_while_it_runs() -> None:
    with two_hosts() as wan:
        show = wan.command("a", ["tc", "qdisc", "show", "dev", "eth0"])
        before = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        wan.set_uplink("a", 10)
        after = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert "rate 100Mbit" in before
    assert "rate 10Mbit" in after


@needs_hosts
def test_whatever_ran_inside_is_gone_afterwards() -> None:
    argv = ["sh", "-c", "setsid sleep 600 & echo $!"]  # it leaves its session and its parent
    with contextlib.suppress(ZeroDivisionError), two_hosts() as wan:
        process = wan.popen("a", argv, stdout=subprocess.PIPE, text=True)
        daemon = int(process.stdout.readline())
        assert is_alive(daemon)
        raise ZeroDivisionError("an exception is a way to leave, too")
    assert not is_alive(daemon)


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_nothing_behind(number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner.stdin, owner.stdout:
        inside = int(owner.stdout.readline())
        assert is_alive(inside)
        owner.send_signal(number)
        assert owner.wait(DEADLINE_S) != 0
        if number is signal.SIGKILL:  # nobody was left to remove it: the next one does
            assert is_alive(inside)
            with two_hosts():
                pass
        until(lambda: not is_alive(inside), f"the end of process {inside}")


def test_the_mark_of_a_process_that_is_about_to_become_another_is_seen() -> None:
    over_and_over = 'exec sh -c "$0" "$0"'
    process = subprocess.Popen(["sh", "-c", over_and_over, over_and_over], env={"ECHO2_WAN": "1"})
    try:
        seen = [namespaces._environment(process.pid) for _ in range(2_000)]
    finally:
        process.kill()
        process.wait()
    assert [one for one in seen if b"ECHO2_WAN=1" not in one] == []


@needs_hosts
def test_an_absent_part_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("nsenter", "ip"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(wan_module.WanError, match="Absent: tc: not found; install iproute2"):
        two_hosts().__enter__()


def test_links_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="up_mbit is 0; allowed are"):
        HostLink("a", 0, 100)
    with pytest.raises(ValueError, match="names of hosts repeat"):
        Wan([HostLink("a", 1, 1), HostLink("a", 1, 1)])
    with pytest.raises(wan_module.WanError, match="there is no host 'c'; there are a, b"):
        two_hosts().cut("c")


# ------------------------------------------------------------------------------- the router


def a_bunch(payload: bytes, size: int, *, flags: int) -> bytes:
    """TCP segments of `size` bytes as the kernel hands them over: one header for all."""
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 40 + len(payload), 7, 0, 64, 6, 0)
    ip += bytes([10, 1, 1, 1, 10, 1, 1, 2])
    tcp = struct.pack("!HHIIBBHHH", 80, 81, 2**32 - 1, 5, 0x50, flags, 9, 0, 0)
    return router.VNET_HEADER.pack(1, 1, 40, size, 20, 16) + ip + tcp + payload


def test_a_bunch_that_loses_segments_is_cut_into_the_rest() -> None:
    payload = bytes(range(250))
    bunch = a_bunch(payload, 100, flags=router.PSH | router.FIN | router.CWR)
    assert router.segments(bunch) == (3, 40)

    parts = list(router.split(bunch, [1], 3))

    assert [count for _, count in parts] == [1, 1]
    for (part, _), begin, end in zip(parts, (0, 200), (100, 250), strict=True):
        ip, tcp = part[10:30], part[30:50]
        assert part[50:] == payload[begin:end]
        assert struct.unpack_from("!H", ip, 2)[0] == 40 + end - begin
        assert struct.unpack_from("!I", tcp, 4)[0] == (2**32 - 1 + begin) % 2**32
        assert ones_sum(ip) == 0xFFFF
        assert struct.unpack_from("!H", tcp, 16)[0] == ones_sum(
            ip[12:20] + struct.pack("!HH", 6, 20 + end - begin)
        )
        assert router.VNET_HEADER.unpack_from(part)[1] == 0
    assert parts[0][0][30 + 13] == router.CWR
    assert parts[1][0][30 + 13] == router.PSH | router.FIN


def test_neighbours_that_are_left_stay_a_bunch() -> None:
    bunch = a_bunch(bytes(400), 100, flags=0)
    parts = list(router.split(bunch, [0], 4))
    assert [count for _, count in parts] == [3]
    assert router.segments(parts[0][0]) == (3, 40)
    assert list(router.split(bunch, [0, 1, 2, 3], 4)) == []


def ones_sum(content: bytes) -> int:
    total = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def test_the_share_of_lost_packets_does_not_depend_on_bunches() -> None:
    import random

    for count in (1, 7):
        losses = router.Losses(0.01, random.Random(3))
        lost = sum(len(losses.among(count)) for _ in range(140_000 // count))
        assert 1_200 <= lost <= 1_600


# ----------------------------------------------------------------------------- the benchmark


@pytest.mark.parametrize(
    ("name", "bound_s"),
    [("homogeneous", 5.12), ("unequal", 3.938), ("slow_origin", 5.12), ("wan", 12.8)],
)
def test_the_fluid_bound_of_each_scenario(name: str, bound_s: float) -> None:
    scenario = broadcast.SCENARIOS[name]
    origin, *workers = scenario.links(scenario.num_workers)
    found = broadcast.bound_s(64e6, origin, workers)
    assert found == pytest.approx(bound_s, abs=1e-3)
