"""The command line of `echo2 token` and `echo2 keys`: who may join a run, and who may no more."""

from __future__ import annotations

from typing import Annotated

import typer

from echo2.cli_options import (
    JsonOption,
    OptionalConfigArgument,
    RunDirOption,
    SetOption,
    call_command,
)

token_app = typer.Typer(no_args_is_help=True, help="Join tokens: one line lets a machine in.")
keys_app = typer.Typer(no_args_is_help=True, help="Public keys that may connect, under names.")


@token_app.command("create")
def create_token(
    config: OptionalConfigArgument = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
    name: Annotated[
        str, typer.Option("--name", help="Name of the one worker that the token lets in.")
    ] = "",
    prefix: Annotated[
        str,
        typer.Option("--prefix", help="Workers are called PREFIX-1, PREFIX-2 ... [joined]"),
    ] = "",
    uses: Annotated[int, typer.Option("--uses", min=1, help="How many workers it lets in.")] = 1,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="Such as 90s, 30m, 24h or 7d.")
    ] = "24h",
    as_json: JsonOption = False,
) -> None:
    """Make a join token: the one line that goes to stdout."""
    call_command(
        "token",
        config,
        run_dir,
        settings or [],
        name=name,
        prefix=prefix,
        uses=uses,
        expires=expires,
        as_json=as_json,
        function="create",
    )


@token_app.command("list")
def list_tokens(
    config: OptionalConfigArgument = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens that were made, how long and how often they can be used, and whom they let in."""
    call_command("token", config, run_dir, settings or [], as_json=as_json, function="list_tokens")


@token_app.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(metavar="ID", help="Its id, or the whole line.")],
    config: OptionalConfigArgument = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
) -> None:
    """Let nobody else in by a token. Workers that it let in stay: `echo2 keys revoke`."""
    call_command("token", config, run_dir, settings or [], token=token, function="revoke")


@keys_app.command("list")
def list_keys(
    config: OptionalConfigArgument = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keys that may connect: under which name, as what, and by which token they came."""
    call_command("keys", config, run_dir, settings or [], as_json=as_json, function="list_keys")


@keys_app.command(
    "authorize",
    # A key may begin with "-", and hold an h.
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
)
def authorize_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the peer is called.")],
    public_key: Annotated[
        str, typer.Argument(metavar="PUBLIC_KEY", help="Its public key, 40 characters.")
    ],
    config: OptionalConfigArgument = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
) -> None:
    """Let the holder of a key in as NAME. A running coordinator takes it up by itself."""
    call_command(
        "keys",
        config,
        run_dir,
        settings or [],
        name=name,
        public_key=public_key,
        function="authorize",
    )


@keys_app.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the peer is called.")],
    config: OptionalConfigArgument = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
) -> None:
    """Let NAME in no more; a running coordinator gives its work to others within a second."""
    call_command("keys", config, run_dir, settings or [], name=name, function="revoke")


@keys_app.command("pardon")
def pardon_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The quarantined worker.")],
    config: OptionalConfigArgument = None,
    run_dir: RunDirOption = None,
    settings: SetOption = None,
) -> None:
    """Lift the quarantine of NAME; it may say hello again, with nothing held against it."""
    call_command("keys", config, run_dir, settings or [], name=name, function="pardon")
