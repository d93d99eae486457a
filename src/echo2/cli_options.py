"""Arguments that several commands have, and how a command's module is called.

Imports nothing heavy: each command's module is imported when it is called.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of the run.")]
RunDirOption = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="Run folder; by default run.dir/run.name."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one setting, e.g. --set learner.steps=20; may be repeated.",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run folder.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]
OptionalConfigArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[CONFIG]", help="TOML file; by default that of the run folder."),
]


def call_command(module: str, /, *arguments: Any, function: str = "main", **options: Any) -> None:
    """Import the command's module, run it, and leave with its exit code."""
    code = getattr(import_module(f"echo2.commands.{module}"), function)(*arguments, **options)
    if code:
        raise typer.Exit(int(code))
