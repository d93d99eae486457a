"""Commands for [provisioner] whose machines are processes of this one: to try it, and for hosts
with several GPUs.

    python -m echo2.provision.local_machine start FOLDER WORKER [KEY=VALUE ...]
    python -m echo2.provision.local_machine stop FOLDER WORKER
    python -m echo2.provision.local_machine list FOLDER

`start` takes the join token from ECHO2_TOKEN, and settings for `echo2 worker --set`. FOLDER gets
WORKER.pid, WORKER.log and the worker's own folder. A worker that was stopped is not started any
more: `stop` may come before the `run` that a killed `start` has left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

TERM_S: Final = 45.0
"""After SIGTERM: the worker hands over what is finished."""
UP_S: Final = 60.0
LOOK_S: Final = 0.05


def main(arguments: list[str]) -> int:
    match arguments:
        case ["start", folder, worker, *settings]:
            return _start(Path(folder), worker, settings)
        case ["run", folder, worker, *settings]:
            _run(Path(folder), worker, settings)
            return 1
        case ["stop", folder, worker]:
            return _stop(Path(folder), worker)
        case ["list", folder]:
            found = sorted(path.stem for path in Path(folder).glob("*.pid"))
            print("\n".join(name for name in found if _pid(Path(folder), name) is not None))
            return 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


def _start(folder: Path, worker: str, settings: list[str]) -> int:
    if not os.environ.get("ECHO2_TOKEN"):
        print("ECHO2_TOKEN is not set: the join token of the worker", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "echo2.provision.local_machine", "run"]
    with (folder / f"{worker}.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, str(folder), worker, *settings],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + UP_S
    while _pid(folder, worker) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            print(f"{worker} did not come up; see {folder / worker}.log", file=sys.stderr)
            return 1
        time.sleep(LOOK_S)
    print(process.pid)
    return 0


def _run(folder: Path, worker: str, settings: list[str]) -> None:
    """Writes down who it is, and becomes the worker. Returns only if it must not."""
    own = os.getpid()
    told = json.dumps({"pid": own, "born": _born(own)})
    aside = folder / f"{worker}.pid.new"
    aside.write_text(told)
    aside.replace(folder / f"{worker}.pid")
    if (folder / f"{worker}.stopped").exists():
        return
    given = [word for setting in settings for word in ("--set", setting)]
    token = os.environ.pop("ECHO2_TOKEN")
    join = ["worker", "--join", token, "--run-dir", str(folder / worker)]
    os.execv(sys.executable, [sys.executable, "-m", "echo2.cli", *join, *given])


def _stop(folder: Path, worker: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{worker}.stopped").touch()
    for number, patience_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
        pid = _pid(folder, worker)
        if pid is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while _pid(folder, worker) is not None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
    if _pid(folder, worker) is None:
        return 0
    print(f"{worker} (pid {_pid(folder, worker)}) does not end", file=sys.stderr)
    return 1


def _pid(folder: Path, worker: str) -> int | None:
    """Of the worker's process, if it lives and is the one that was started."""
    try:
        told = json.loads((folder / f"{worker}.pid").read_text())
    except FileNotFoundError:
        return None
    pid = int(told["pid"])
    return pid if _born(pid) == told["born"] else None


def _born(pid: int) -> int:
    """When the kernel started it, in ticks; 0 if it is not there or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
