"""Where the keys and tokens of a run lie, for commands that look at them or change them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echo2.commands.run_folder import RunFolder
from echo2.config import Config, load_config
from echo2.errors import ConfigError
from echo2.logs import setup_logging


@dataclass(frozen=True, slots=True)
class Access:
    """`keys_dir` may not exist yet: a run that was never started has no keys."""

    config: Config
    folder: RunFolder
    keys_dir: Path

    @classmethod
    def of(
        cls,
        path: Path | None,
        run_dir: Path | None,
        overrides: Sequence[str],
        *,
        needs_curve: bool = True,
    ) -> Access:
        """From a configuration, or from the one that a run folder keeps. Raises ConfigError.
        Logs go to stderr from now on: what is printed is for programs too."""
        setup_logging("info", "console")
        if path is None:
            if run_dir is None:
                raise ConfigError("give the CONFIG of the run, or its folder with --run-dir DIR")
            path = RunFolder(run_dir).resolved_config
            if not path.exists():
                raise ConfigError(
                    f"{run_dir} holds no config.resolved.toml: no run was started there; give its "
                    "CONFIG too"
                )
        config = load_config(path, overrides)
        if needs_curve and not config.net.curve:
            raise ConfigError(
                "net.curve is false: this run has neither keys nor tokens, whoever is on this "
                "machine may join; set net.curve = true"
            )
        folder = RunFolder.of(config, run_dir)
        given = config.net.keys_dir
        return cls(config, folder, Path(given) if given else folder.path / "keys")
