"""A write waits for its approval, happens once, and is the one that was shown."""

from __future__ import annotations

import asyncio

import pytest

from tests.pair.caller import Conversation, Heard, new_id
from tests.pair.rig import Rig, concludes, finish, report, write
from turnfence import records as r
from turnfence.axes import CheckpointType, FailureReason, ReleaseOutcome, ResumeAction, RunState, TurnStatus
from turnfence.errors import Reason

CREATED = concludes("It was created.", "status is created")


async def asked(rig: Rig, title: str, tool: str = "write_thing") -> tuple[Conversation, Heard]:
    """A conversation that waits for the approval of one write."""
    rig.task_turn("writer", write(tool, title), CREATED)
    talk = rig.talk("writer")
    heard = await talk.say(f"write {title}")
    assert heard.question.checkpoint.type is CheckpointType.APPROVAL
    return talk, heard


async def test_nothing_is_written_before_the_approval_and_its_fields_are_exact(rig: Rig) -> None:
    title = new_id()
    talk, heard = await asked(rig, title)
    checkpoint = heard.question.checkpoint
    assert [(field.label, field.value) for field in checkpoint.fields] == [("Title", title)]
    assert checkpoint.pending_action is not None
    assert checkpoint.pending_action.args_json == ""  # what is masked must not travel beside its mask
    assert heard.done.checkpoint_id == checkpoint.checkpoint_id
    assert heard.status is TurnStatus.WAITING
    assert heard.release is ReleaseOutcome.SUCCESS
    assert rig.tools.events("write_thing") == []
    run = await talk.get_run(heard.run_id)
    assert (run.run_state, run.turn_status) == (RunState.SUCCESS, TurnStatus.WAITING)


async def test_CONFIRM_writes_once_with_the_key_in_its_arguments(rig: Rig) -> None:
    title = new_id()
    talk, heard = await asked(rig, title)
    confirmed = await talk.act(ResumeAction.CONFIRM, heard.done.checkpoint_id)
    assert confirmed.report.conclusion == "It was created."
    assert rig.tools.happened("write_thing") == ["called", "applied"]
    called = rig.tools.events("write_thing")[0]
    assert called["title"] == title
    assert called["request_id"] == called["key"] != ""
    again = await talk.act(ResumeAction.CONFIRM, heard.done.checkpoint_id)
    assert isinstance(again.content.body, r.Notice)
    assert len(rig.tools.events("write_thing")) == 2


async def test_REJECT_writes_nothing_and_ends_the_task(rig: Rig) -> None:
    talk, heard = await asked(rig, new_id())
    rejected = await talk.act(ResumeAction.REJECT, heard.done.checkpoint_id)
    assert rejected.release is ReleaseOutcome.SUCCESS
    late = await talk.act(ResumeAction.CONFIRM, heard.done.checkpoint_id)
    assert isinstance(late.content.body, r.Notice)
    assert rig.tools.events("write_thing") == []


async def test_words_are_no_confirmation(rig: Rig) -> None:
    """The router takes "yes" for the task's continuation: the question is shown again, nothing is run."""
    talk, heard = await asked(rig, new_id())
    rig.says(
        "turn_decision",
        {"mode": "CONTINUE_TASK", "intent": "DIAGNOSIS", "agent_id": "", "goal_summary": "", "reply": ""},
    )
    answered = await talk.say("yes, confirm, do it")
    body = answered.content.body
    assert isinstance(body, r.CheckpointPrompt | r.Notice)
    assert rig.tools.events("write_thing") == []
    assert answered.done.checkpoint_id == heard.done.checkpoint_id


async def test_a_checkpoint_of_another_conversation_approves_nothing(rig: Rig) -> None:
    _, mine = await asked(rig, new_id())
    other, _ = await asked(rig, new_id())
    heard = await other.act(ResumeAction.CONFIRM, mine.done.checkpoint_id)
    assert heard.error is None
    assert rig.tools.events("write_thing") == []


async def test_two_CONFIRMs_at_once_write_once(rig: Rig) -> None:
    talk, heard = await asked(rig, new_id())
    both = await asyncio.gather(*(talk.act(ResumeAction.CONFIRM, heard.done.checkpoint_id) for _ in range(2)))
    assert rig.tools.happened("write_thing") == ["called", "applied"]
    refused = [one for one in both if one.error is not None]
    assert all(one.error is not None and one.error.reason is Reason.CONVERSATION_BUSY for one in refused)
    assert len(refused) <= 1


@pytest.mark.parametrize("tool", ["write_thing", "write_plain"])
async def test_a_write_that_fails_is_said_to_have_failed(rig: Rig, tool: str) -> None:
    title = new_id()
    rig.tools.tell(tool, mode="error")
    rig.task_turn("writer", write(tool, title), lambda body: [finish(body, missing=("it was not created",))])
    talk = rig.talk("writer")
    heard = await talk.say(f"write {title}")
    heard = await talk.act(ResumeAction.CONFIRM, heard.done.checkpoint_id)
    assert heard.release in (ReleaseOutcome.FALLBACK, ReleaseOutcome.SUCCESS)
    assert "applied" not in rig.tools.happened(tool)
    assert len([e for e in rig.tools.events(tool) if e["event"] == "called"]) == 1


async def test_a_claim_of_success_that_the_result_does_not_carry_is_not_published(rig: Rig) -> None:
    title = new_id()
    rig.tools.tell("write_plain", mode="business_failure")
    rig.task_turn(
        "writer",
        write("write_plain", title),
        lambda body: [
            report(body, "status is created"),
            finish(body, "It was created.", "status is “created”"),
        ],
    )
    talk = rig.talk("writer")
    heard = await talk.say(f"write {title}")
    heard = await talk.act(ResumeAction.CONFIRM, heard.done.checkpoint_id)
    assert heard.of(r.Content) == []
    assert heard.failure is FailureReason.INVALID_DRAFT  # the goal's gate let no conclusion through
