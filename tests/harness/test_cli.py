"""The commands: what they print, what they ask, how they end, and that they leave no process behind."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from harness_service.cli import conversation, render, services
from harness_service.core.catalogue import Agent, Catalogue, Skill, ToolContract
from harness_service.live_runs import LiveRuns
from harness_service.ports import OfferedTool, StateStore, ToolProvider
from harness_service.server import running
from harness_service.servicer import HarnessServicer
from harness_service.settings import LimitSettings, Settings
from harness_service.turn_types import TurnChannel, TurnRequest
from turnfence import records as r
from turnfence.axes import (
    CheckpointType,
    Durability,
    FailureReason,
    FallbackType,
    ProcessingStage,
    ReleaseOutcome,
    ResumeAction,
    RunState,
    SideEffect,
    TurnStatus,
)
from turnfence.errors import FieldViolation, Reason, TurnfenceError
from turnfence.serving.process import SystemClock

APPROVAL = r.TaskCheckpoint(
    "k1",
    CheckpointType.APPROVAL,
    "n1",
    question="Please confirm before I run ops.create_ticket:",
    allowed_actions=[ResumeAction.CONFIRM, ResumeAction.REJECT, ResumeAction.CANCEL],
    pending_action=r.PendingAction("ops.create_ticket", "", "abc123"),
    fields=[r.ShownField("Title", "disk full"), r.ShownField("Phone", "******")],
)
FOLLOW_UP = r.TaskCheckpoint(
    "k2",
    CheckpointType.FOLLOW_UP,
    "n1",
    question="Which host?",
    allowed_actions=[ResumeAction.REPLY, ResumeAction.CANCEL],
    suggestions=["alpha", "beta"],
    expected_fields=["host"],
)


def _lines(kind: r.EventKind) -> list[str]:
    return [line.text for line in render.lines_of(r.TurnEvent(1, "run1", "c1", kind))]


def _prompt(checkpoint: r.TaskCheckpoint) -> r.Content:
    return r.Content(r.CheckpointPrompt(checkpoint), checkpoint.question)


# --- what is printed --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        (r.Metadata("run1", "c1", "m1"), ["conversation c1, run run1"]),
        (
            r.Metadata("run1", "c1", "m1", truncated=True),
            ["conversation c1, run run1", "the message was too long and was cut"],
        ),
        (r.Progress("n", "Disk", "Calling ops.df", "ops.df"), ["· Disk: Calling ops.df"]),
        (r.Progress("n", "Disk", "Working on: Disk"), ["· Working on: Disk"]),
        (r.Progress(tool_name="ops.df"), ["· ops.df"]),
        (r.Progress(), []),
        (r.Content(r.ChatReply("hi"), "hi"), ["", "hi", ""]),
        (r.Failure(FailureReason.TIMED_OUT, "Too late."), ["", "Too late. (TIMED_OUT)", ""]),
        (
            r.Done(
                ReleaseOutcome.SUCCESS,
                TurnStatus.DONE,
                Durability.PERSISTED,
                r.Usage(2, 3, 10, 5, duration=1240),
            ),
            ["SUCCESS, task DONE, persisted; 2 model calls, 3 tool calls, 15 tokens, 1.2 s"],
        ),
        (
            r.Done(ReleaseOutcome.FAILED, TurnStatus.FAILED, None, r.Usage(tokens_estimated=True)),
            ["FAILED, task FAILED; 0 model calls, 0 tool calls, about 0 tokens"],
        ),
        (r.Gap(2, 8), ["· events 2 to 8 are no longer kept"]),
    ],
)
def test_an_event_as_lines(kind: r.EventKind, lines: list[str]) -> None:
    assert _lines(kind) == lines


@pytest.mark.parametrize("stage", list(ProcessingStage))
def test_every_stage_has_words(stage: ProcessingStage) -> None:
    (line,) = _lines(r.Status(stage))
    assert line.startswith("· ")


def test_a_fallback_is_not_shown_like_an_answer() -> None:
    fallback = r.Content(r.Fallback(FallbackType.INSUFFICIENT_EVIDENCE), "Not enough.")
    event = r.TurnEvent(1, "run1", "c1", fallback)
    assert render.Line("Not enough.", render.Tone.BAD) in render.lines_of(event)


def test_an_approval_shows_tool_and_exact_fields() -> None:
    assert _lines(_prompt(APPROVAL)) == [
        "",
        "Please confirm before I run ops.create_ticket:",
        "  tool: ops.create_ticket",
        "  arguments' hash: abc123",
        "  Title: disk full",
        "  Phone: ******",
        "  waiting for CONFIRM, REJECT, CANCEL (checkpoint k1)",
        "",
    ]


def test_a_field_that_the_question_shows_is_not_repeated() -> None:
    said = "Please confirm:\nTitle: disk full\nPhone: ******"
    lines = _lines(r.Content(r.CheckpointPrompt(APPROVAL), said))
    assert [line for line in lines if line.startswith("  Title")] == []


def test_a_question_shows_its_suggestions_by_number() -> None:
    assert _lines(_prompt(FOLLOW_UP))[1:] == [
        "Which host?",
        "  asked for: host",
        "  1) alpha",
        "  2) beta",
        "  waiting for REPLY, CANCEL (checkpoint k2)",
        "",
    ]


def test_nothing_shown_can_steer_the_terminal() -> None:
    hostile = "\x1b[2Jsafe\r\u202eevil\u200b\ttab\nline"
    assert render.shown(hostile) == "\\u001b[2Jsafe\\u000d\\u202eevil\\u200b\ttab\nline"
    assert _lines(r.Content(r.ChatReply(hostile), hostile))[1] == render.shown(hostile)


def test_an_error_names_every_field_and_when_to_retry() -> None:
    error = TurnfenceError(
        Reason.INVALID_REQUEST,
        violations=[FieldViolation("text", "must not be empty"), FieldViolation("locale", "is wrong")],
    )
    lines = [line.text for line in render.lines_of_error(error)]
    assert lines == [
        "INVALID_REQUEST: The request is not valid.",
        "  text must not be empty",
        "  locale is wrong",
    ]
    (busy,) = render.lines_of_error(TurnfenceError(Reason.CONVERSATION_BUSY))
    assert busy.text.endswith("(may be tried again in 1 s)")


# --- what is asked ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "typed", "answer"),
    [
        (APPROVAL, "CONFIRM", render.Answer(ResumeAction.CONFIRM)),
        (APPROVAL, " confirm ", render.Answer(ResumeAction.CONFIRM)),
        (APPROVAL, "reject", render.Answer(ResumeAction.REJECT)),
        (APPROVAL, "cancel", render.Answer(ResumeAction.CANCEL)),
        (APPROVAL, "", None),
        (APPROVAL, "  ", None),
        (APPROVAL, "c", render.Answer(None, "c")),
        (APPROVAL, "confirm it", render.Answer(None, "confirm it")),
        (APPROVAL, "yes", render.Answer(None, "yes")),
        (APPROVAL, "1", render.Answer(None, "1")),
        (FOLLOW_UP, "gamma", render.Answer(ResumeAction.REPLY, "gamma")),
        (FOLLOW_UP, "2", render.Answer(ResumeAction.REPLY, "beta")),
        (FOLLOW_UP, "3", render.Answer(ResumeAction.REPLY, "3")),
        (FOLLOW_UP, "confirm", render.Answer(ResumeAction.REPLY, "confirm")),
        (FOLLOW_UP, "reply", render.Answer(ResumeAction.REPLY, "reply")),
        (FOLLOW_UP, "cancel", render.Answer(ResumeAction.CANCEL)),
    ],
)
def test_what_a_typed_line_answers(
    checkpoint: r.TaskCheckpoint, typed: str, answer: render.Answer | None
) -> None:
    assert render.answer_of(checkpoint, typed) == answer


def test_the_question_offers_what_is_allowed() -> None:
    assert render.question_of(APPROVAL) == "CONFIRM / REJECT / CANCEL (empty: answer later)"
    assert render.question_of(FOLLOW_UP) == "CANCEL / your reply (empty: answer later)"


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(ReleaseOutcome.SUCCESS, 0), (ReleaseOutcome.FALLBACK, 1), (ReleaseOutcome.FAILED, 1)],
)
def test_exit_codes(outcome: ReleaseOutcome, code: int) -> None:
    assert render.exit_code(r.Done(outcome, TurnStatus.DONE)) == code
    assert render.exit_code(None) == 1


# --- the commands against a service -----------------------------------------------------------------

CATALOGUE = Catalogue(
    agents={"ops": Agent("ops", "Operations", "Looks after hosts.", skills=("look",))},
    skills={"look": Skill("look", "Look", tools=("ops.df", "ops.create"))},
    tools={
        "ops.df": ToolContract("ops.df", "ops", "df"),
        "ops.create": ToolContract("ops.create", "ops", "create", side_effect=SideEffect.WRITE),
    },
    mcp_servers={},
)


class OneTool:
    """A tool provider of which one server answers."""

    async def schemas(self) -> dict[str, OfferedTool]:
        return {"ops.df": OfferedTool("ops__df", "Disk", {})}


class Scripted:
    """Asks for approval, releases what was confirmed, falls back or fails on demand."""

    def __init__(self) -> None:
        self.requests: list[TurnRequest] = []

    async def __call__(self, request: TurnRequest, channel: TurnChannel) -> r.Run:
        self.requests.append(request)
        if request.text == "busy":
            raise TurnfenceError(Reason.CONVERSATION_BUSY)
        channel.publish(r.Metadata(request.run_id, request.conversation_id, request.message_id))
        outcome = ReleaseOutcome.SUCCESS
        waiting = TurnStatus.DONE
        if request.text == "fail":
            channel.publish(r.Failure(FailureReason.INTERNAL, "broken"))
            outcome, waiting = ReleaseOutcome.FAILED, TurnStatus.FAILED
        elif request.text == "write":
            channel.publish(_prompt(APPROVAL))
            waiting = TurnStatus.WAITING
        elif request.text == "unsure":
            channel.publish(r.Content(r.Fallback(FallbackType.INSUFFICIENT_EVIDENCE), "unsure"))
            outcome = ReleaseOutcome.FALLBACK
        else:
            said = f"did {request.action or request.text}"
            channel.publish(r.Content(r.ChatReply(said), said))
        channel.publish(r.Done(outcome, waiting))
        return r.Run(request.run_id, run_state=RunState.SUCCESS)


@asynccontextmanager
async def serving(turn: Scripted) -> AsyncIterator[str]:
    limits = LimitSettings(drain=5)
    runs = LiveRuns(turn, SystemClock(), limits)
    servicer = HarnessServicer(
        runs,
        cast(StateStore, object()),
        CATALOGUE,
        cast(ToolProvider, OneTool()),
        reader_stall=15,
        timeout=5,
    )
    async with running(servicer, runs, Settings(harness_listen="127.0.0.1:0", limits=limits)) as address:
        yield address


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TURNFENCE_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


async def command(*arguments: str) -> tuple[int | None, str, str]:
    """Run ``harness-service`` with its input closed; exit code, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "harness_service",
        *arguments,
        env=_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("hello", 0, "did hello"),
        ("write", 0, "  Title: disk full"),
        ("unsure", 1, "unsure"),
        ("fail", 1, "broken (INTERNAL)"),
        ("busy", 1, "CONVERSATION_BUSY"),
    ],
)
async def test_run_prints_the_turn_and_exits_by_its_outcome(text: str, code: int, said: str) -> None:
    async with serving(turn := Scripted()) as address:
        ended, out, err = await command("run", text, "--target", address, "--conversation", "c9")
    assert (ended, err) == (code, "")
    assert said in out
    assert "\x1b[" not in out  # no colours: it is no terminal
    assert [request.conversation_id for request in turn.requests] == ["c9"]


async def test_run_sends_what_its_options_say() -> None:
    async with serving(turn := Scripted()) as address:
        code, out, _ = await command(
            *("run", "--action", "confirm", "--checkpoint", "k1", "--organ", "o", "--user", "u"),
            *("--agent", "ops", "--locale", "zh-CN", "--target", address),
        )
    assert (code, "did CONFIRM" in out) == (0, True)
    (request,) = turn.requests
    assert request.principal == r.Principal("o", "u")
    assert (request.action, request.checkpoint_id) == (ResumeAction.CONFIRM, "k1")
    assert (request.agent_id, request.locale) == ("ops", "zh-CN")


async def test_run_as_json_prints_one_object_a_line() -> None:
    async with serving(Scripted()) as address:
        code, out, _ = await command("run", "hello", "--json", "--target", address)
        bad, refused, _ = await command("run", "hello", "--json", "--target", address, "--agent", "nobody")
    assert code == 0
    events = [r.from_json(line, r.TurnEvent) for line in out.splitlines()]
    assert [type(event.kind) for event in events] == [r.Metadata, r.Content, r.Done]
    assert bad == 2
    (line,) = refused.splitlines()
    assert json.loads(line)["error"]["violations"][0]["field"] == "agent_id"


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--target", "127.0.0.1:1"),
        ("run", " ", "--target", "127.0.0.1:1"),
        ("run", "x", "--action", "perhaps"),
        ("nonsense",),
        ("serve", "--listen", "0.0.0.0:7070"),
        ("serve", "--listen", "nowhere"),
    ],
)
async def test_wrong_usage_exits_2_and_says_why(arguments: tuple[str, ...]) -> None:
    code, out, err = await command(*arguments)
    assert (code, out) == (2, "")
    assert err
    assert "Traceback" not in err


@pytest.mark.parametrize("variable", ["TURNFENCE_KNOWLEDGE", "TURNFENCE_CATALOGUE"])
async def test_a_folder_that_is_missing_is_named_without_a_traceback(variable: str, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "harness_service", "serve", "--listen", "127.0.0.1:0"),
        env={**_environment(), variable: str(tmp_path / "nowhere")},
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"nowhere" in err
    assert b"Traceback" not in err


async def test_bad_settings_exit_2_naming_every_variable() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "harness_service", "serve"),
        env={**_environment(), "TURNFENCE_STATE__LEASE": "x", "TURNFENCE_LOG__LEVEL": "x"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"TURNFENCE_STATE__LEASE" in err
    assert b"TURNFENCE_LOG__LEVEL" in err


async def test_a_service_that_is_not_there_is_named_and_exits_1() -> None:
    code, out, _ = await command("run", "x", "--target", "127.0.0.1:1")
    assert code == 1
    assert "cannot be reached" in out


async def test_agents_lists_the_catalogue_and_what_does_not_answer() -> None:
    async with serving(Scripted()) as address:
        code, out, _ = await command("agents", "--target", address)
    assert code == 0
    assert out.splitlines() == [
        "ops: Operations",
        "  Looks after hosts.",
        "  look: Look",
        "    ops.df",
        "    ops.create (asks first, its server does not answer)",
    ]


async def _talk(address: str, typed: list[str], talk: Any) -> list[str]:
    """Run ``talk`` in a thread with scripted input; what was asked."""
    asked: list[str] = []
    lines = iter(typed)

    def ask(question: str) -> str:
        asked.append(question)
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    def in_thread() -> None:
        with conversation.connected(address) as stub:
            talk(conversation.Caller(stub, "o", "u"), ask)

    await asyncio.to_thread(in_thread)
    return asked


async def test_run_on_a_terminal_asks_until_nothing_waits() -> None:
    codes: list[int] = []

    def once(caller: conversation.Caller, ask: Any) -> None:
        codes.append(conversation.converse_once(caller, "write", None, "", lambda _: None, ask))

    async with serving(turn := Scripted()) as address:
        asked = await _talk(address, ["confirm"], once)
    assert asked == [render.question_of(APPROVAL)]
    assert codes == [0]
    first, second = turn.requests
    assert (second.action, second.checkpoint_id) == (ResumeAction.CONFIRM, "k1")
    assert second.conversation_id == first.conversation_id
    assert second.message_id != first.message_id


@pytest.mark.parametrize("typed", [[""], []])
async def test_run_leaves_a_checkpoint_waiting_when_nobody_answers(typed: list[str]) -> None:
    def once(caller: conversation.Caller, ask: Any) -> None:
        conversation.converse_once(caller, "write", None, "", lambda _: None, ask)

    async with serving(turn := Scripted()) as address:
        await _talk(address, typed, once)
    assert len(turn.requests) == 1


async def test_chat_stays_in_one_conversation_and_survives_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def chatting(caller: conversation.Caller, ask: Any) -> None:
        conversation.chat(caller, lambda _: None, ask)

    async with serving(turn := Scripted()) as address:
        typed = ["hello", "busy", "", "write", "reject", "write", "", "bye", "/quit", "unheard"]
        asked = await _talk(address, typed, chatting)
    sent = [(request.text, request.action, request.checkpoint_id) for request in turn.requests]
    assert sent == [
        ("hello", None, ""),
        ("busy", None, ""),
        ("write", None, ""),
        ("", ResumeAction.REJECT, "k1"),
        ("write", None, ""),
        ("bye", None, ""),
    ]
    assert len({request.conversation_id for request in turn.requests}) == 1
    assert asked.count(render.question_of(APPROVAL)) == 2
    assert "CONVERSATION_BUSY" in capsys.readouterr().out


# --- the children -----------------------------------------------------------------------------------

FAKE_SERVICE = """
import os, signal, sys, time
fd = int(sys.argv[sys.argv.index("--ready-fd") + 1])
if os.environ.get("FAKE_FAILS"):
    sys.stderr.write("no such database\\n")
    sys.exit(3)
os.write(fd, b"127.0.0.1:77\\n")
os.close(fd)
signal.sigwait({signal.SIGUSR1})
"""


@pytest.fixture
def fake_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fake_service.py").write_text(FAKE_SERVICE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "fake_service"


def _gone(pidfd: int, seconds: float = 20.0) -> bool:
    """Whether the process behind ``pidfd`` ends in time."""
    return bool(select.select([pidfd], [], [], seconds)[0])


def test_a_service_is_known_by_its_address_and_is_stopped(fake_service: str) -> None:
    with services._service(fake_service, "127.0.0.1:0", {}, None) as child:
        assert child.address == "127.0.0.1:77"
        assert child.process.poll() is None
    assert child.process.returncode == -signal.SIGTERM


def test_a_service_that_dies_before_it_is_ready_is_explained(
    fake_service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")
    with (
        (tmp_path / "log").open("w+b") as log,
        pytest.raises(services.ServiceDown, match=r"exit code 3\n  no such database"),
        services._service(fake_service, "", {}, log),
    ):
        raise AssertionError


def test_a_service_is_stopped_when_its_user_fails(fake_service: str) -> None:
    started: list[services.Child] = []

    def failing() -> None:
        with services._service(fake_service, "", {}, None) as child:
            started.append(child)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert started[0].process.returncode == -signal.SIGTERM


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends children with their parent")
async def test_a_service_dies_with_its_parent_even_by_sigkill(fake_service: str, tmp_path: Path) -> None:
    parent_script = textwrap.dedent(f"""
        from harness_service.cli import services
        with services._service({fake_service!r}, "", {{}}, None) as child:
            print(child.process.pid, flush=True)
            child.process.wait()
    """)
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", parent_script),
        env={**_environment(), "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    async with asyncio.timeout(20):
        pidfd = os.pidfd_open(int(await parent.stdout.readline()))
    try:
        parent.kill()
        await parent.wait()
        assert await asyncio.to_thread(_gone, pidfd)
    finally:
        os.close(pidfd)
