"""The folder of one run: what lies where, and who serves it now.

Files that name a live process (`coordinator.json`, `origin.json`) are written aside and
renamed by that process, so a reader sees a whole one or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echo2.config import Config, config_to_toml
from echo2.errors import Echo2Error
from echo2.folder_errors import folder_errors


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.resolved_config = self.path / "config.resolved.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.logs = self.path / "logs"
        self._lock = self.path / "run.lock"

    @classmethod
    def of(cls, config: Config, run_dir: Path | None) -> RunFolder:
        """The folder that was given, or run.dir/run.name."""
        return cls(run_dir if run_dir is not None else Path(config.run.dir) / config.run.name)

    def is_used(self) -> bool:
        """Whether it holds anything of a run but keys: a join token may be made before.
        ConfigError when that cannot be seen."""
        with folder_errors(self.path):
            return self.path.exists() and any(each.name != "keys" for each in self.path.iterdir())

    def make(self) -> None:
        """Make the folder and that of its logs. ConfigError when they cannot be made."""
        with folder_errors(self.path):
            self.logs.mkdir(parents=True, exist_ok=True)

    def prepare(self, config: Config) -> None:
        """Make the folder and write the resolved configuration (it may hold a token: 0600).
        ConfigError when the disk does not take it; an earlier one is unchanged then."""
        self.make()
        aside = self.resolved_config.with_suffix(f".{os.getpid()}")
        with folder_errors(self.path):
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(
                        "# Every setting of this run with its value, as read at its start.\n"
                    )
                    file.write(config_to_toml(config))
                    file.flush()
                    os.fsync(file.fileno())
                aside.replace(self.resolved_config)
            except OSError:
                aside.unlink(missing_ok=True)
                raise

    def coordinator(self) -> dict[str, Any] | None:
        """What a coordinator wrote about itself, or None."""
        return self._record("coordinator.json")

    def origin(self) -> dict[str, Any] | None:
        return self._record("origin.json")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Held while `echo2 run` works on the folder; a second one is refused."""
        with contextlib.ExitStack() as stack:
            with folder_errors(self.path):
                file = stack.enter_context(self._lock.open("a+", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise Echo2Error(
                    f"{self.path} is in use by another echo2 run (pid {file.read().strip()}); "
                    "end that one, or give another --run-dir"
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def _record(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Echo2Error(
                f"{path} cannot be read ({error.strerror}); let this user read it"
            ) from error
        except ValueError as error:
            raise Echo2Error(f"{path} is not JSON ({error}); remove it and start again") from error
        if not isinstance(record, dict):
            raise Echo2Error(f"{path} holds no JSON object; remove it and start again")
        return record


def is_alive(pid: object) -> bool:
    """Whether a process of this id exists on this machine (a zombie does not count)."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] != "Z"
