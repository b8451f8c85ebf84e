"""The commands of ``harness-service`` (wire.md, Commands and settings). Each imports what it needs when it
runs: ``--help`` must not wait for gRPC, the agent's tools or a model's client."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="harness-service",
    help="Runs the turns of an agent's conversation: one at a time, no write twice, no unguarded answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # they print local variables: users' words, and secrets
    add_completion=False,
)

_FREE = "127.0.0.1:0"


class ActionName(StrEnum):
    """How a waiting checkpoint is answered."""

    REPLY = "reply"
    CONFIRM = "confirm"
    REJECT = "reject"
    CANCEL = "cancel"


TargetOption = Annotated[
    str,
    typer.Option(
        envvar="TURNFENCE_HARNESS_TARGET",
        help="gRPC target of a running harness service; without it both services are started for the "
        "time of this command.",
    ),
]
ConversationOption = Annotated[str, typer.Option(help="Conversation to continue; empty: a new one.")]
AgentOption = Annotated[str, typer.Option(help="Agent to work; empty: the router picks.")]
OrganOption = Annotated[str, typer.Option(help="Organisation of the end user.")]
UserOption = Annotated[str, typer.Option(help="The end user.")]
LocaleOption = Annotated[str, typer.Option(help="Language of the runtime's own replies: en or zh-CN.")]
LogsOption = Annotated[bool, typer.Option("--logs", help="Show the logs of services started here.")]


@app.command()
def serve(
    listen: Annotated[
        str | None, typer.Option(help="host:port or unix:/path; instead of TURNFENCE_HARNESS_LISTEN.")
    ] = None,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. All settings come from TURNFENCE_… variables."""
    import asyncio

    from harness_service.settings import load_settings
    from turnfence.serving.listening import CannotListen
    from turnfence.serving.logs import configure
    from turnfence.serving.settings import InvalidSettings

    try:
        settings = load_settings(harness_listen=listen)
    except InvalidSettings as error:
        _fail(str(error), 2)
    configure(settings.log.level, settings.log.format)
    from harness_service.adapters.catalogue_yaml import CatalogueInvalid
    from harness_service.server import CannotServe
    from harness_service.server import serve as serve_harness

    try:
        asyncio.run(serve_harness(settings, ready_fd))
    except CannotListen as error:
        _fail(str(error), 2)
    except CatalogueInvalid as error:
        _fail(f"the catalogue is not valid:\n{error}", 2)
    except CannotServe as error:
        _fail(str(error), 2)


@app.command()
def dev(
    free_ports: Annotated[
        bool, typer.Option("--free-ports", help="Take any free ports instead of the configured ones.")
    ] = False,
) -> None:
    """Start both services on the embedded default and stay until Ctrl-C."""
    from harness_service.cli import services

    listen = _FREE if free_ports else ""
    with _stopped_by_signals(), _service_errors():
        try:
            with services.both_services(state_listen=listen, harness_listen=listen, show_logs=True) as pair:
                typer.echo(f"state    {pair.state.address}")
                typer.echo(f"harness  {pair.harness.address}")
                typer.echo(f"try: harness-service chat --target {pair.harness.address}")
                services.wait_for_an_end(pair)
        except KeyboardInterrupt:
            typer.echo("stopped")
            return
    _fail("a service has ended; its log is above", 1)


@app.command()
def run(
    text: Annotated[str, typer.Argument(help="The message; may be left out with --action.")] = "",
    target: TargetOption = "",
    conversation: ConversationOption = "",
    agent: AgentOption = "",
    organ: OrganOption = "local",
    user: UserOption = "local",
    locale: LocaleOption = "",
    action: Annotated[ActionName | None, typer.Option(help="Answer to a waiting checkpoint.")] = None,
    checkpoint: Annotated[str, typer.Option(help="The checkpoint that --action answers.")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, and no questions.")
    ] = False,
    logs: LogsOption = False,
) -> None:
    """Send one turn and print its events as they come. Exits 0 when an answer was released, 1 for a
    fallback or a failure, 2 for wrong usage."""
    if not text.strip() and action is None:
        _fail("nothing to send: give a TEXT or an --action", 2)
    with _stopped_by_signals(), _service_errors(), _harness(target, logs) as address:
        from harness_service.cli import conversation as talk
        from turnfence.axes import ResumeAction

        interactive = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
        with talk.connected(address) as stub:
            caller = talk.Caller(stub, organ, user, conversation, agent, locale)
            code = _answered(
                lambda: talk.converse_once(
                    caller,
                    text,
                    ResumeAction(action.value.upper()) if action else None,
                    checkpoint,
                    talk.show_json if as_json else talk.show_lines,
                    _ask if interactive else None,
                ),
                as_json=as_json,
            )
    raise typer.Exit(code)


@app.command()
def chat(
    target: TargetOption = "",
    conversation: ConversationOption = "",
    agent: AgentOption = "",
    organ: OrganOption = "local",
    user: UserOption = "local",
    locale: LocaleOption = "",
    logs: LogsOption = False,
) -> None:
    """Talk in one conversation; /quit or Ctrl-D ends it, Ctrl-C cancels the turn that runs."""
    with _stopped_by_signals(), _service_errors(), _harness(target, logs) as address:
        from harness_service.cli import conversation as talk

        with talk.connected(address) as stub:
            talk.chat(talk.Caller(stub, organ, user, conversation, agent, locale), talk.show_lines, _ask)


@app.command()
def agents(target: TargetOption = "", logs: LogsOption = False) -> None:
    """List the agents, skills and tools of this deployment."""
    with _stopped_by_signals(), _service_errors(), _harness(target, logs) as address:
        from harness_service.cli import conversation as talk

        def listed() -> int:
            talk.print_lines(talk.list_agents(stub))
            return 0

        with talk.connected(address) as stub:
            code = _answered(listed, as_json=False)
    raise typer.Exit(code)


@contextmanager
def _harness(target: str, show_logs: bool) -> Iterator[str]:
    """The given target, or that of services which live as long as this context."""
    if target:
        yield target
        return
    from harness_service.cli import services

    with (
        services.on_private_sockets() as (state, harness),
        services.both_services(state_listen=state, harness_listen=harness, show_logs=show_logs) as pair,
    ):
        yield pair.harness.address


def _answered(call: Any, *, as_json: bool) -> int:
    """What ``call`` returns; a status that it ended with is printed, and becomes an exit code."""
    from harness_service.cli import conversation as talk
    from turnfence.errors import TurnfenceError

    try:
        code: int = call()
    except TurnfenceError as error:
        talk.print_error(error, as_json=as_json)
        return talk.exit_code_of(error)
    return code


def _ask(question: str) -> str:
    if question:
        typer.echo(question)
    return input("> ")


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as an exception does, so that it leaves no child behind."""

    def stop(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _service_errors() -> Iterator[None]:
    from harness_service.cli.services import ServiceDown

    try:
        yield
    except ServiceDown as error:
        _fail(str(error), 1)


def _fail(message: str, code: int) -> NoReturn:
    typer.secho(message, err=True, fg="red")
    raise SystemExit(code)
