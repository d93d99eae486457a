"""How else a file reaches every host: an HTTP star and BitTorrent, on the hosts of a Wan.

Both get the best start that they could have. Star: the server is up, the clients' processes
too, and the clock starts when they are told to fetch. BitTorrent: every worker has the
torrent's description and an open connection to every other, and the clock starts when the
origin is told to seed. A worker is done when it holds every byte (BitTorrent: verified).

BitTorrent needs libtorrent in the Python that runs it: pip install libtorrent
"""

from __future__ import annotations

import argparse
import functools
import http.client
import http.server
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from broadcast_actor import Actor
from wan import Wan

PIECE_BYTES: Final = 256 << 10
PORT: Final = 8000
READY_S: Final = 60.0
MESH_S: Final = 20.0
"""The workers' connections to each other come up in this, or what is up must do."""


def run_star(
    wan: Wan, file: Path, folder: Path, *, origin: str, workers: Sequence[str], limit_s: float
) -> dict[str, float]:
    """Seconds until each worker has fetched `file` from the origin's HTTP server."""
    script = [sys.executable, __file__]
    server = Actor(wan, origin, [*script, "serve", wan.address(origin), str(file.parent)], folder)
    ready = time.monotonic() + READY_S
    server.hear("ready", deadline=ready)
    clients = [
        Actor(
            wan,
            name,
            [*script, "fetch", wan.address(origin), file.name, str(folder / name)],
            folder,
        )
        for name in workers
    ]
    for client in clients:
        client.hear("ready", deadline=ready)
    started = time.monotonic()
    for client in clients:
        client.tell("go")
    return _seconds(clients, started, limit_s)


def run_torrent(
    wan: Wan,
    file: Path,
    folder: Path,
    *,
    origin: str,
    workers: Sequence[str],
    limit_s: float,
    python: str = sys.executable,
) -> dict[str, float]:
    """Seconds until each worker has `file` and has verified every piece."""
    torrent = folder / "file.torrent"
    subprocess.run([python, __file__, "describe", str(file), str(torrent)], check=True)

    def start(host: str, role: str, where: Path, others: Sequence[str]) -> Actor:
        addresses = ",".join(wan.address(other) for other in others)
        argv = [python, __file__, role, str(torrent), str(where), wan.address(host), addresses]
        return Actor(wan, host, argv, folder)

    seeder = start(origin, "seed", file.parent, workers)
    leechers = []
    for index, name in enumerate(workers):
        (folder / name).mkdir()
        # One of a pair dials, or both would drop the connection that is one too many.
        leechers.append(start(name, "leech", folder / name, workers[:index]))
    actors = [seeder, *leechers]
    ready = time.monotonic() + READY_S
    for actor in actors:
        actor.hear("ready", deadline=ready)
    for leecher in leechers:
        leecher.tell(f"connect {len(leechers) - 1}")
    for leecher in leechers:
        leecher.hear("connected", deadline=ready)
    started = time.monotonic()
    seeder.tell("go")
    return _seconds(leechers, started, limit_s)


def torrent_problem(python: str) -> str:
    """Why BitTorrent cannot run with this Python; empty if it can."""
    done = subprocess.run(
        [python, "-c", "import libtorrent"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    return (
        f"it needs libtorrent in {python}: pip install libtorrent, or name a Python that has it "
        "with --torrent-python, or leave it out with --peers star"
    )


def _seconds(actors: Sequence[Actor], started: float, limit_s: float) -> dict[str, float]:
    deadline = started + limit_s
    return {actor.host: float(actor.hear("done", deadline=deadline)) - started for actor in actors}


# ------------------------------------------------------------------------- on the hosts


def serve(address: str, folder: str) -> None:
    class Handler(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 256  # the default of 5 makes some clients of a fleet wait a second

    with Server((address, PORT), functools.partial(Handler, directory=folder)) as server:
        print("ready", flush=True)
        server.serve_forever()


def fetch(address: str, name: str, target: str) -> None:
    content = memoryview(bytearray(1 << 20))
    with Path(target).open("wb", buffering=0) as file:
        print("ready", flush=True)
        sys.stdin.readline()
        connection = http.client.HTTPConnection(address, PORT)
        connection.request("GET", f"/{name}")
        response = connection.getresponse()
        left = int(response.headers["Content-Length"])
        while left and (count := response.readinto(content)):
            file.write(content[:count])
            left -= count
    if response.status != http.HTTPStatus.OK or left:
        raise SystemExit(f"status {response.status}, {left} bytes are missing")
    print("done", time.monotonic(), flush=True)


def describe(file: str, torrent: str) -> None:
    lt = _libtorrent()
    made = lt.create_torrent(lt.list_files(file), PIECE_BYTES)
    lt.set_piece_hashes(made, str(Path(file).parent))
    Path(torrent).write_bytes(lt.bencode(made.generate()))


def seed(torrent: str, folder: str, address: str, others: str) -> None:
    session = _session(address)
    print("ready", flush=True)
    sys.stdin.readline()
    handle = _add(session, torrent, folder, seeds=True)
    _connect(handle, others)
    sys.stdin.read()  # until the benchmark ends


def leech(torrent: str, folder: str, address: str, others: str) -> None:
    lt = _libtorrent()
    session = _session(address)
    handle = _add(session, torrent, folder, seeds=False)
    print("ready", flush=True)
    num_others = int(sys.stdin.readline().split()[1])
    _connect(handle, others)
    deadline = time.monotonic() + MESH_S
    while len(handle.get_peer_info()) < num_others and time.monotonic() < deadline:
        session.wait_for_alert(50)
        session.pop_alerts()
    print("connected", flush=True)
    while True:
        session.wait_for_alert(1000)
        for alert in session.pop_alerts():
            if isinstance(alert, lt.torrent_finished_alert):
                print("done", time.monotonic(), flush=True)


def _libtorrent() -> Any:
    try:
        import libtorrent
    except ImportError as error:
        raise SystemExit(f"{error}: pip install libtorrent") from error
    return libtorrent


def _session(address: str) -> Any:
    """TCP alone, no discovery, as many unchoked peers as a fleet has."""
    lt = _libtorrent()
    return lt.session(
        {
            "listen_interfaces": f"{address}:{PORT}",
            "alert_mask": lt.alert.category_t.status_notification,
            "enable_dht": False,
            "enable_lsd": False,
            "enable_upnp": False,
            "enable_natpmp": False,
            "enable_outgoing_utp": False,
            "enable_incoming_utp": False,
            "mixed_mode_algorithm": 0,
            "choking_algorithm": 0,
            "unchoke_slots_limit": 8,
            "min_reconnect_time": 1,
        }
    )


def _add(session: Any, torrent: str, folder: str, *, seeds: bool) -> Any:
    lt = _libtorrent()
    wanted = lt.add_torrent_params()
    wanted.ti = lt.torrent_info(torrent)
    wanted.save_path = folder
    if seeds:
        wanted.flags |= lt.torrent_flags.seed_mode
    return session.add_torrent(wanted)


def _connect(handle: Any, others: str) -> None:
    for other in filter(None, others.split(",")):
        handle.connect_peer((other, PORT))


def main() -> None:
    roles: dict[str, Callable[..., None]] = {
        role.__name__: role for role in (serve, fetch, describe, seed, leech)
    }
    parser = argparse.ArgumentParser(description="What broadcast.py starts on the hosts.")
    parser.add_argument("role", choices=sorted(roles))
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    roles[options.role](*options.arguments)


if __name__ == "__main__":
    main()
