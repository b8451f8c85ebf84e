"""``python -m state_service``, also installed as ``state-service``.

Each command imports what it needs when it runs: ``--help`` must not wait for gRPC or a driver.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from state_service.settings import Settings

app = typer.Typer(
    name="state-service",
    help="Keeps the state of an agent's conversations: the fence, the flush, the persist.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # they print local variables: users' words, and secrets
    add_completion=False,
)


@app.command()
def serve(
    listen: Annotated[
        str | None, typer.Option(help="host:port or unix:/path; instead of TURNFENCE_STATE_LISTEN.")
    ] = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. All settings come from TURNFENCE_… variables."""
    import asyncio

    settings = _settings(listen)
    from state_service import server
    from turnfence.serving.listening import CannotListen

    try:
        asyncio.run(server.serve(settings, ready_fd))
    except CannotListen as error:
        _fail(str(error), 2)
    except server.CannotServe as error:
        _fail(str(error), 1)


@app.command()
def migrate() -> None:
    """Bring the SQL schema to what this version works with; safe to repeat."""
    import asyncio

    settings = _settings()
    from state_service import server

    try:
        revision = asyncio.run(server.migrate(settings))
    except server.CannotServe as error:
        _fail(str(error), 1)
    typer.echo(f"the schema is at revision {revision}")


@app.command()
def sweep() -> None:
    """Look once after conversations that nobody comes back to, finish deletions, apply retention."""
    import asyncio

    import msgspec

    settings = _settings()
    from state_service import server

    try:
        swept = asyncio.run(server.sweep_once(settings))
    except server.CannotServe as error:
        _fail(str(error), 1)
    typer.echo(", ".join(f"{name} {count}" for name, count in msgspec.structs.asdict(swept).items()))


def _settings(listen: str | None = None) -> Settings:
    """The environment's settings, and logs as they say; bad ones end the process with one message."""
    from state_service.settings import load_settings
    from turnfence.serving.logs import configure
    from turnfence.serving.settings import InvalidSettings

    try:
        settings = load_settings(state_listen=listen)
    except InvalidSettings as error:
        _fail(str(error), 2)
    configure(settings.log.level, settings.log.format)
    return settings


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"state-service: {message}\n")
    raise typer.Exit(code)


def main() -> None:
    app(prog_name="state-service")


if __name__ == "__main__":
    main()
