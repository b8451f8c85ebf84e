"""One conversation with a harness service, as the commands hold it: send a message, see its events, answer
what waits. Synchronous on purpose: one call at a time, and Ctrl-C is an ordinary exception."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc
import typer
from grpc_status import rpc_status

from harness_service.cli.render import (
    NOT_RELEASED,
    USAGE,
    Line,
    Tone,
    answer_of,
    exit_code,
    lines_of,
    lines_of_agents,
    lines_of_error,
    question_of,
)
from turnfence import records as r
from turnfence.axes import ResumeAction
from turnfence.codec import from_message
from turnfence.common.v1 import axes_pb2, run_pb2
from turnfence.errors import Reason, TurnfenceError
from turnfence.harness.v1 import harness_pb2 as pb
from turnfence.harness.v1 import harness_pb2_grpc
from turnfence.rpc_errors import from_status

_LIST_SECONDS = 30.0
_ACTIONS = {
    None: axes_pb2.RESUME_ACTION_UNSPECIFIED,
    ResumeAction.REPLY: axes_pb2.RESUME_ACTION_REPLY,
    ResumeAction.CONFIRM: axes_pb2.RESUME_ACTION_CONFIRM,
    ResumeAction.REJECT: axes_pb2.RESUME_ACTION_REJECT,
    ResumeAction.CANCEL: axes_pb2.RESUME_ACTION_CANCEL,
}
_STYLES: dict[Tone, dict[str, Any]] = {
    Tone.PLAIN: {},
    Tone.QUIET: {"dim": True},
    Tone.STRONG: {"bold": True},
    Tone.BAD: {"fg": "red"},
}

Show = Callable[[r.TurnEvent], None]


@dataclass
class Caller:
    """Who speaks, to whom, and where. ``conversation_id`` is filled in by the first answer; ``timeout`` is
    that of one turn, in seconds."""

    stub: Any
    organ_id: str
    user_id: str
    conversation_id: str = ""
    agent_id: str = ""
    locale: str = ""
    timeout: float = 660.0


@dataclass(frozen=True)
class TurnResult:
    """How a turn ended for its caller; ``checkpoint`` is what now waits for an answer."""

    exit_code: int
    checkpoint: r.TaskCheckpoint | None = None


@contextmanager
def connected(target: str) -> Iterator[Any]:
    """The stub of the harness service at ``target``."""
    with grpc.insecure_channel(target) as channel:
        yield harness_pb2_grpc.HarnessServiceStub(channel)


def take_turn(
    caller: Caller, text: str, action: ResumeAction | None, checkpoint_id: str, show: Show
) -> TurnResult:
    """Run one turn and show its events as they come. Raises ``TurnfenceError`` for a call that ended with a
    status; leaving it early (Ctrl-C) cancels the call, and with it the run."""
    request = pb.RunTurnRequest(
        principal=run_pb2.Principal(organ_id=caller.organ_id, user_id=caller.user_id),
        conversation_id=caller.conversation_id,
        agent_id=caller.agent_id,
        message_id=uuid.uuid4().hex,
        text=text,
        action=_ACTIONS[action],
        checkpoint_id=checkpoint_id,
        locale=caller.locale,
    )
    done: r.Done | None = None
    checkpoint: r.TaskCheckpoint | None = None
    call = caller.stub.RunTurn(request, timeout=caller.timeout)
    try:
        for response in call:
            for message in response.events:
                event = from_message(message, r.TurnEvent)
                show(event)
                if isinstance(event.kind, r.Metadata):
                    caller.conversation_id = event.kind.conversation_id
                elif isinstance(event.kind, r.Done):
                    done = event.kind
                elif isinstance(event.kind, r.Content) and isinstance(event.kind.body, r.CheckpointPrompt):
                    checkpoint = event.kind.body.checkpoint
    except grpc.RpcError as error:
        raise _error_of(error) from None
    finally:
        call.cancel()
    return TurnResult(exit_code(done), checkpoint)


def converse_once(
    caller: Caller,
    text: str,
    action: ResumeAction | None,
    checkpoint_id: str,
    show: Show,
    ask: Callable[[str], str] | None,
) -> int:
    """One message, and as long as something waits and there is somebody to ask, the answers to it."""
    result = take_turn(caller, text, action, checkpoint_id, show)
    while ask is not None and result.checkpoint is not None:
        try:
            answer = answer_of(result.checkpoint, ask(question_of(result.checkpoint)))
        except EOFError:
            break
        if answer is None:
            break
        waiting = result.checkpoint.checkpoint_id if answer.action else ""
        result = take_turn(caller, answer.text, answer.action, waiting, show)
    return result.exit_code


def chat(caller: Caller, show: Show, ask: Callable[[str], str]) -> None:
    """Read lines and run them as turns until /quit or the end of input. A line is the answer to what waits,
    if something does; Ctrl-C while a turn runs cancels that turn alone."""
    checkpoint: r.TaskCheckpoint | None = None
    while True:
        try:
            line = ask(question_of(checkpoint) if checkpoint else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if not line:
            checkpoint = None
            continue
        action, text = (None, line) if checkpoint is None else answer_of(checkpoint, line) or (None, line)
        waiting = checkpoint.checkpoint_id if checkpoint and action else ""
        try:
            checkpoint = take_turn(caller, text, action, waiting, show).checkpoint
        except KeyboardInterrupt:
            print_lines([Line("cancelled", Tone.BAD)])
        except TurnfenceError as error:
            print_lines(lines_of_error(error))


def list_agents(stub: Any) -> list[Line]:
    """All pages of the catalogue. Raises ``TurnfenceError``."""
    agents: list[Any] = []
    skills: list[Any] = []
    tools: list[Any] = []
    token = ""
    try:
        while True:
            page = stub.ListAgents(pb.ListAgentsRequest(page_token=token), timeout=_LIST_SECONDS)
            agents += page.agents
            skills += page.skills
            tools += page.tools
            token = page.next_page_token
            if not token:
                return lines_of_agents(agents, skills, tools)
    except grpc.RpcError as error:
        raise _error_of(error) from None


def show_lines(event: r.TurnEvent) -> None:
    print_lines(lines_of(event))


def show_json(event: r.TurnEvent) -> None:
    typer.echo(r.to_json(event))


def print_lines(lines: list[Line]) -> None:
    """Colours only on a terminal, and not where NO_COLOR is set."""
    color = False if os.environ.get("NO_COLOR") else None
    for line in lines:
        typer.secho(line.text, color=color, **_STYLES[line.tone])


def print_error(error: TurnfenceError, *, as_json: bool) -> None:
    """A status, where the events would be: a reader of JSON lines gets it as one."""
    if as_json:
        faults = [{"field": fault.field, "description": fault.description} for fault in error.violations]
        said = {"reason": error.reason, "message": error.message, "violations": faults}
        typer.echo(r.to_json({"error": said}))
    else:
        print_lines(lines_of_error(error))


def exit_code_of(error: TurnfenceError) -> int:
    """A request that is wrong as it stands is wrong usage; everything else is a turn without an answer."""
    return USAGE if error.reason in (Reason.INVALID_REQUEST, Reason.NOT_SERVED) else NOT_RELEASED


def _error_of(error: grpc.RpcError) -> TurnfenceError:
    """The error that the service gave; a harness that cannot be reached gave none."""
    call = cast(grpc.Call, error)
    status = rpc_status.from_call(call)
    known = from_status(status) if status is not None else None
    if known is not None:
        return known
    code = call.code()
    reasons = {
        grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED: Reason.CANCELLED,
        grpc.StatusCode.UNIMPLEMENTED: Reason.NOT_SERVED,
        grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.OVERLOADED,
    }
    if code is grpc.StatusCode.UNAVAILABLE:
        return TurnfenceError(Reason.INTERNAL, message="The harness service cannot be reached.")
    return TurnfenceError(reasons.get(code, Reason.INTERNAL), message=f"{code.name}: {call.details()}")
