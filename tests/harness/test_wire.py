"""What RunTurn accepts, and how every bad field is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration

from harness_service import wire
from harness_service.core.catalogue import Agent, Catalogue, Skill, ToolContract, VerifyContract
from harness_service.core.input_hash import input_hash
from harness_service.ports import OfferedTool
from turnfence import records as r
from turnfence.axes import ProcessingStage, ResumeAction, RunState, SideEffect
from turnfence.common.v1 import axes_pb2, run_pb2
from turnfence.errors import Reason, TurnfenceError
from turnfence.harness.v1 import harness_pb2 as pb

AGENTS = ("ops", "desk")


def _request(**fields: Any) -> pb.RunTurnRequest:
    given: dict[str, Any] = {
        "principal": run_pb2.Principal(organ_id="o", user_id="u"),
        "text": "hello",
    } | fields
    return pb.RunTurnRequest(**given)


def _admit(request: pb.RunTurnRequest) -> wire.Admission:
    return wire.admit(request, agents=AGENTS)


def _faults(call: Callable[[], object]) -> dict[str, str]:
    with pytest.raises(TurnfenceError) as caught:
        call()
    assert caught.value.reason is Reason.INVALID_REQUEST
    return {fault.field: fault.description for fault in caught.value.violations}


def test_a_minimal_request_gets_its_ids_and_defaults() -> None:
    one, two = _admit(_request()), _admit(_request())
    turn = one.turn
    assert not one.names_conversation
    assert (turn.text, turn.locale, turn.action, turn.budget) == ("hello", "en", None, r.Budget())
    made = {turn.run_id, turn.conversation_id, turn.message_id, two.turn.run_id, two.turn.conversation_id}
    assert len(made) == 5
    assert all(len(i) == 32 for i in made)


def test_every_field_arrives() -> None:
    admission = wire.admit(
        _request(
            conversation_id="c.1",
            agent_id="ops",
            message_id="m-1",
            text="",
            action=axes_pb2.RESUME_ACTION_CONFIRM,
            checkpoint_id="k_1",
            budget=run_pb2.Budget(
                model_calls=1, tool_calls=2, tokens=3, payload_bytes=4, deadline=Duration(seconds=5)
            ),
            on_disconnect=axes_pb2.ON_DISCONNECT_CANCEL,
            busy_policy=axes_pb2.BUSY_POLICY_REJECT,
            locale="zh-CN",
        ),
        agents=AGENTS,
        call_deadline=7.5,
    )
    turn = admission.turn
    assert admission.names_conversation
    assert turn.principal == r.Principal(organ_id="o", user_id="u")
    assert (turn.conversation_id, turn.agent_id, turn.message_id) == ("c.1", "ops", "m-1")
    assert (turn.action, turn.checkpoint_id) == (ResumeAction.CONFIRM, "k_1")
    assert turn.budget == r.Budget(model_calls=1, tool_calls=2, tokens=3, payload_bytes=4, deadline=5000)
    assert (turn.call_deadline, turn.locale) == (7.5, "zh-CN")


BAD_IDS = [
    "a" * 65,
    "a" * 10_000,
    "{a}",
    "a:b",
    "a b",
    "a ",
    "a|b",
    "a\x00",
    "a\n",
    "\u202ea",
    "é",
    "🙂",
    "' OR 1=1",
    "a/b",
]


@pytest.mark.parametrize("field", ["conversation_id", "agent_id", "message_id", "checkpoint_id"])
@pytest.mark.parametrize("value", BAD_IDS)
def test_ids_outside_the_alphabet_are_refused(field: str, value: str) -> None:
    assert list(_faults(lambda: _admit(_request(**{field: value})))) == [field]


@pytest.mark.parametrize("part", ["organ_id", "user_id"])
@pytest.mark.parametrize("value", ["", *BAD_IDS])
def test_the_principal_is_required_and_checked(part: str, value: str) -> None:
    principal = {"organ_id": "o", "user_id": "u"} | {part: value}
    faults = _faults(lambda: _admit(_request(principal=run_pb2.Principal(**principal))))
    assert list(faults) == [f"principal.{part}"]


@pytest.mark.parametrize("value", ["a", "a" * 64, "..", "__proto__", "A-Z_0.9"])
def test_ids_of_the_alphabet_are_taken(value: str) -> None:
    turn = _admit(_request(conversation_id=value, message_id=value, checkpoint_id=value)).turn
    assert (turn.conversation_id, turn.message_id, turn.checkpoint_id) == (value, value, value)


@pytest.mark.parametrize(
    ("fields", "bad"),
    [
        ({"text": ""}, "text"),
        ({"text": " \n\t"}, "text"),
        ({"text": "a" * 65_537}, "text"),
        ({"text": "é" * 32_769}, "text"),
        ({"text": "a\x00b"}, "text"),
        ({"text": "a\x1b[31mb"}, "text"),
        ({"text": "a\rb"}, "text"),
        ({"text": "a\x85b"}, "text"),
        ({"text": "a\x7fb"}, "text"),
        ({"agent_id": "nobody"}, "agent_id"),
        ({"action": 99}, "action"),
        ({"action": -1}, "action"),
        ({"action": axes_pb2.RESUME_ACTION_CONFIRM}, "checkpoint_id"),
        ({"action": axes_pb2.RESUME_ACTION_REJECT}, "checkpoint_id"),
        ({"budget": run_pb2.Budget(model_calls=-1)}, "budget.model_calls"),
        ({"budget": run_pb2.Budget(tool_calls=-1)}, "budget.tool_calls"),
        ({"budget": run_pb2.Budget(tokens=-(2**63))}, "budget.tokens"),
        ({"budget": run_pb2.Budget(tokens=2**63 - 1)}, "budget.tokens"),
        ({"budget": run_pb2.Budget(payload_bytes=-1)}, "budget.payload_bytes"),
        ({"budget": run_pb2.Budget(deadline=Duration())}, "budget.deadline"),
        ({"budget": run_pb2.Budget(deadline=Duration(nanos=999_999))}, "budget.deadline"),
        ({"budget": run_pb2.Budget(deadline=Duration(seconds=-1))}, "budget.deadline"),
        ({"budget": run_pb2.Budget(deadline=Duration(seconds=1, nanos=-5))}, "budget.deadline"),
        ({"budget": run_pb2.Budget(deadline=Duration(seconds=2**62))}, "budget.deadline"),
        ({"on_disconnect": 7}, "on_disconnect"),
        ({"busy_policy": 7}, "busy_policy"),
        ({"locale": "english please"}, "locale"),
        ({"locale": "e"}, "locale"),
        ({"locale": "en_US"}, "locale"),
        ({"locale": "en-" + "-".join(["abcdefgh"] * 5)}, "locale"),
    ],
)
def test_one_bad_field_is_named(fields: dict[str, Any], bad: str) -> None:
    assert list(_faults(lambda: _admit(_request(**fields)))) == [bad]


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a" * 65_536},
        {"text": "line\n\ttab"},
        {"text": "\u202e right to left, 🙂"},
        {"text": "", "action": axes_pb2.RESUME_ACTION_REPLY},
        {"text": "", "action": axes_pb2.RESUME_ACTION_CANCEL},
        {"action": axes_pb2.RESUME_ACTION_REPLY},
        {"budget": run_pb2.Budget(deadline=Duration(nanos=1_000_000))},
        {"locale": "zh-Hans-CN"},
        {"locale": "de"},
    ],
)
def test_what_lies_on_the_good_side_of_a_limit_is_taken(fields: dict[str, Any]) -> None:
    assert _admit(_request(**fields)).turn.text == fields.get("text", "hello")


def test_all_bad_fields_are_named_together() -> None:
    unknown = cast(Any, 9)
    bad = pb.RunTurnRequest(
        conversation_id="{",
        agent_id="nobody",
        message_id=":",
        action=axes_pb2.RESUME_ACTION_CONFIRM,
        budget=run_pb2.Budget(model_calls=-1, tokens=-1, deadline=Duration(seconds=-1)),
        on_disconnect=unknown,
        busy_policy=unknown,
        locale="?",
    )
    assert set(_faults(lambda: _admit(bad))) == {
        "principal.organ_id",
        "principal.user_id",
        "conversation_id",
        "agent_id",
        "message_id",
        "checkpoint_id",
        "budget.model_calls",
        "budget.tokens",
        "budget.deadline",
        "on_disconnect",
        "busy_policy",
        "locale",
    }


def test_no_violation_repeats_what_was_sent() -> None:
    canary = "canary:s3cret"
    faults = _faults(lambda: _admit(_request(conversation_id=canary, agent_id=canary, locale=canary)))
    assert canary not in "".join(faults.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("on_disconnect", axes_pb2.ON_DISCONNECT_CONTINUE),
        ("busy_policy", axes_pb2.BUSY_POLICY_WAIT),
    ],
)
def test_a_policy_that_is_not_served_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(TurnfenceError) as caught:
        _admit(_request(**{field: value}))
    assert (caught.value.reason, caught.value.status) == (Reason.NOT_SERVED, "UNIMPLEMENTED")
    assert caught.value.metadata == {"field": field}


def test_a_bad_field_comes_before_one_that_is_not_served() -> None:
    request = _request(text="", on_disconnect=axes_pb2.ON_DISCONNECT_CONTINUE)
    assert list(_faults(lambda: _admit(request))) == ["text"]


def test_run_named() -> None:
    request = pb.GetRunRequest(principal=run_pb2.Principal(organ_id="o", user_id="u"), run_id="r1")
    assert wire.run_named(request) == r.GetRunRequest(organ_id="o", user_id="u", run_id="r1")
    assert set(_faults(lambda: wire.run_named(pb.GetRunRequest(run_id="{")))) == {
        "principal.organ_id",
        "principal.user_id",
        "run_id",
    }
    assert set(_faults(lambda: wire.run_named(pb.GetRunRequest(principal=request.principal)))) == {"run_id"}


def test_events_and_runs_go_out() -> None:
    event = r.TurnEvent(1, "run", "c", r.Status(ProcessingStage.ROUTING), time=1_500)
    sent = wire.events_response([event]).events[0]
    assert (sent.sequence, sent.WhichOneof("kind")) == (1, "status")
    assert sent.status.stage == axes_pb2.PROCESSING_STAGE_ROUTING
    assert sent.time.ToMilliseconds() == 1_500
    run = wire.run_response(r.Run("run", run_state=RunState.RUNNING)).run
    assert (run.run_id, run.run_state) == ("run", axes_pb2.RUN_STATE_RUNNING)
    assert run.release_outcome == axes_pb2.RELEASE_OUTCOME_UNSPECIFIED


# --- ListAgents -----------------------------------------------------------------------------------

CATALOGUE = Catalogue(
    agents={
        "ops": Agent("ops", title="Ops", description="Hosts", skills=("look", "write")),
        "desk": Agent("desk", title="Desk", skills=("write",)),
    },
    skills={
        "look": Skill("look", tools=("ops.df",), delegatable=True),
        "write": Skill("write", tools=("ops.create", "ops.df"), target="ops.create"),
        "unused": Skill("unused"),
    },
    tools={
        "ops.df": ToolContract("ops.df", "ops", "df"),
        "ops.create": ToolContract(
            "ops.create",
            "ops",
            "create",
            side_effect=SideEffect.WRITE,
            verify=VerifyContract("ops.find", args={}, found="`true`"),
        ),
    },
    mcp_servers={},
)


def _list(**fields: Any) -> pb.ListAgentsResponse:
    return wire.agents_response(
        CATALOGUE, {"ops.df": OfferedTool("ops__df", "Disk", {})}, pb.ListAgentsRequest(**fields)
    )


def test_the_catalogue_is_listed_in_its_order_each_thing_once() -> None:
    listed = _list()
    assert [agent.agent_id for agent in listed.agents] == ["ops", "desk"]
    assert [skill.skill_key for skill in listed.skills] == ["look", "write"]
    assert [tool.tool_name for tool in listed.tools] == ["ops.df", "ops.create"]
    df, create = listed.tools
    assert (df.side_effect, df.confirm, df.available, df.description) == (
        axes_pb2.SIDE_EFFECT_NONE,
        False,
        True,
        "Disk",
    )
    assert (create.side_effect, create.confirm, create.available) == (axes_pb2.SIDE_EFFECT_WRITE, True, False)
    assert create.verify_tool_name == "ops.find"
    assert listed.next_page_token == ""


def test_pages_follow_each_other() -> None:
    first = _list(page_size=1)
    assert [agent.agent_id for agent in first.agents] == ["ops"]
    second = _list(page_size=1, page_token=first.next_page_token)
    assert [agent.agent_id for agent in second.agents] == ["desk"]
    assert [skill.skill_key for skill in second.skills] == ["write"]
    assert second.next_page_token == ""


@pytest.mark.parametrize(
    ("fields", "bad"),
    [
        ({"page_size": -1}, "page_size"),
        ({"page_size": 201}, "page_size"),
        ({"page_token": "x"}, "page_token"),
        ({"page_token": "-1"}, "page_token"),
        ({"page_token": "2"}, "page_token"),
        ({"page_token": "٣"}, "page_token"),
        ({"page_token": "9" * 5000}, "page_token"),
    ],
)
def test_a_bad_page_is_refused(fields: dict[str, Any], bad: str) -> None:
    assert list(_faults(lambda: _list(**fields))) == [bad]


# --- the identity of a message ---------------------------------------------------------------------


def test_the_input_hash_tells_messages_apart() -> None:
    said = {
        input_hash("a"),
        input_hash("a "),
        input_hash("a", ResumeAction.REPLY),
        input_hash("a", ResumeAction.CONFIRM, "k"),
        input_hash("a", ResumeAction.CONFIRM, "l"),
        input_hash("", ResumeAction.CONFIRM, "k"),
    }
    assert len(said) == 6
    assert input_hash("ä", ResumeAction.REPLY, "k") == input_hash("ä", ResumeAction.REPLY, "k")
