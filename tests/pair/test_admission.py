"""Who may run a turn, and what is refused at the door: nothing of a refused turn is ever stored."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.model_server import Fault
from tests.pair.caller import Conversation, Heard, events_of, new_id, refused
from tests.pair.rig import Rig, concludes, read_fact
from turnfence import records as r
from turnfence.axes import ReleaseOutcome, RunState, TerminationReason
from turnfence.common.v1 import run_pb2
from turnfence.errors import Reason, TurnfenceError

TOO_LONG = "a" * 65_537

# What is sent, and the field that the answer must name.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"principal": None}, "principal.organ_id"),
    ({"principal": {"organ_id": "o{1}", "user_id": "u"}}, "principal.organ_id"),
    ({"principal": {"organ_id": "o", "user_id": ""}}, "principal.user_id"),
    ({"principal": {"organ_id": "o", "user_id": "u" * 65}}, "principal.user_id"),
    ({"conversation_id": "a:b"}, "conversation_id"),
    ({"conversation_id": "a|b"}, "conversation_id"),
    ({"agent_id": "nobody"}, "agent_id"),
    ({"agent_id": "no body"}, "agent_id"),
    ({"message_id": "m 1"}, "message_id"),
    ({"text": ""}, "text"),
    ({"text": TOO_LONG}, "text"),
    ({"action": 99}, "action"),
    ({"action": 2}, "checkpoint_id"),
    ({"action": 2, "checkpoint_id": "{x}"}, "checkpoint_id"),
    ({"on_disconnect": 99}, "on_disconnect"),
    ({"busy_policy": 99}, "busy_policy"),
    ({"locale": "en_US; DROP"}, "locale"),
    ({"budget": {"tool_calls": -1}}, "budget.tool_calls"),
    ({"budget": {"deadline": {"seconds": -5}}}, "budget.deadline"),
]


@pytest.mark.parametrize(("bad", "named"), BAD, ids=[f"{n}-{i}" for i, (_, n) in enumerate(BAD)])
async def test_a_bad_field_is_named_and_no_store_is_touched(
    rig: Rig, bad: dict[str, Any], named: str
) -> None:
    """The state service is paused: whoever needed it would wait."""
    rig.pair.state.pause()
    try:
        error = await refused(
            rig.caller, rig.talk().request(**({"text": "hello"} | bad)), Reason.INVALID_REQUEST
        )
    finally:
        rig.pair.state.resume()
    assert named in [violation.field for violation in error.violations]


@pytest.mark.parametrize(("field", "value"), [("on_disconnect", 2), ("busy_policy", 2)])
async def test_a_field_that_is_not_served_is_refused_by_name(rig: Rig, field: str, value: int) -> None:
    error = await refused(rig.caller, rig.talk().request("hello", **{field: value}), Reason.NOT_SERVED)
    assert field in str(error)


async def test_a_text_of_64_KiB_is_taken_and_the_caller_told_that_it_was_cut(rig: Rig) -> None:
    rig.task_turn("reader", read_fact(), concludes())
    heard = await rig.talk().say("a" * 65_536)
    assert heard.of(r.Metadata)[0].truncated
    assert heard.release is ReleaseOutcome.SUCCESS


# --- one turn at a time ---------------------------------------------------------------------------


async def parked(rig: Rig, talk: Conversation) -> tuple[Any, asyncio.Task[Heard]]:
    """A turn that waits inside a read tool for its gate."""
    rig.tools.tell("read_fact", mode="hang")
    rig.task_turn("reader", read_fact(), concludes())
    talk.conversation_id = new_id()
    request = talk.request("look at it", message_id=new_id())
    going = asyncio.create_task(rig.caller.run(request))
    await rig.tools.seen("called", "read_fact")
    return request, going


async def test_a_second_caller_is_told_at_once_that_the_conversation_is_busy(rig: Rig) -> None:
    talk = rig.talk()
    _, going = await parked(rig, talk)
    heard = await rig.caller.run(talk.request("me too"), timeout=1.5)
    assert heard.error is not None
    assert heard.error.reason is Reason.CONVERSATION_BUSY
    assert heard.error.retry_after
    assert not going.done()
    rig.tools.open_gate("read_fact")
    assert (await going).release is ReleaseOutcome.SUCCESS


async def test_another_user_is_refused_and_changes_nothing(rig: Rig) -> None:
    rig.task_turn("reader", read_fact(), concludes())
    talk = rig.talk()
    first = await talk.say()
    stranger = run_pb2.Principal(organ_id=talk.principal.organ_id, user_id=new_id())
    await refused(rig.caller, talk.request("mine", principal=stranger), Reason.CONVERSATION_FORBIDDEN)
    with pytest.raises(TurnfenceError) as caught:
        await rig.caller.get_run(stranger, first.run_id)
    assert caught.value.reason is Reason.NOT_FOUND
    rig.task_turn("reader", read_fact(), concludes())
    assert (await talk.say("still mine")).release is ReleaseOutcome.SUCCESS


# --- one message, one run -------------------------------------------------------------------------


async def test_a_message_sent_again_while_it_runs_follows_that_run(rig: Rig) -> None:
    talk = rig.talk()
    request, going = await parked(rig, talk)
    again = asyncio.create_task(rig.caller.run(request))
    rig.tools.open_gate("read_fact")
    first, second = await going, await again
    assert second.events == first.events
    assert rig.tools.happened("read_fact") == ["called"]


async def test_a_message_sent_again_after_its_end_is_answered_from_the_record(rig: Rig) -> None:
    rig.task_turn("reader", read_fact(), concludes())
    talk = rig.talk()
    message_id = new_id()
    first = await talk.say(message_id=message_id)
    calls = len(rig.model.requests)
    again = await talk.say(message_id=message_id)
    assert again.events == first.events
    assert len(rig.model.requests) == calls


async def test_a_message_id_with_other_words_is_refused(rig: Rig) -> None:
    rig.task_turn("reader", read_fact(), concludes())
    talk = rig.talk()
    message_id = new_id()
    await talk.say(message_id=message_id)
    await refused(rig.caller, talk.request("other words", message_id=message_id), Reason.MESSAGE_ID_REUSED)


# --- a caller that goes away ----------------------------------------------------------------------


async def test_a_caller_that_hangs_up_ends_the_run_and_the_record_says_so(rig: Rig) -> None:
    talk = rig.talk()
    rig.tools.tell("read_fact", mode="hang")
    rig.task_turn("reader", read_fact(), concludes())
    call = rig.caller.call(talk.request("look at it"))
    run_id = ""
    async for event in events_of(call):
        run_id = event.run_id
        if isinstance(event.kind, r.Progress) and event.kind.tool_name:
            break
    call.cancel()
    run = await ended(talk, run_id)
    assert run.run_state is RunState.CANCELLED
    assert run.termination_reason is TerminationReason.CLIENT_DISCONNECTED
    assert run.answer is None


async def test_a_call_deadline_that_passes_ends_the_run_as_timed_out(rig: Rig) -> None:
    talk = rig.talk()
    rig.task_turn("reader", Fault(hang=True))
    heard = await rig.caller.run(talk.request("look at it"), timeout=1.5)
    if heard.error is None:  # the run keeps a tenth of the deadline to say how it ended
        assert heard.release is ReleaseOutcome.FAILED
    run = await ended(talk, heard.run_id)
    assert run.run_state is RunState.TIMED_OUT
    assert run.termination_reason is TerminationReason.DEADLINE_EXCEEDED


async def ended(talk: Conversation, run_id: str) -> r.Run:
    async with asyncio.timeout(10):
        while True:
            run = await talk.get_run(run_id)
            if run.run_state is not RunState.RUNNING:
                return run
            await asyncio.sleep(0.02)  # between two looks at the record


async def test_health_and_reflection_are_served(rig: Rig) -> None:
    stub: Any = health_pb2_grpc.HealthStub(rig.caller.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service="turnfence.harness.v1.HarnessService"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert rig.caller.channel.get_state() is grpc.ChannelConnectivity.READY
