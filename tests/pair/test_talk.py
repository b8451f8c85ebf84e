"""What a conversation carries from turn to turn, and answers that need no task."""

from __future__ import annotations

from tests.pair.caller import new_id
from tests.pair.rig import Rig, concludes, read_fact
from turnfence import records as r
from turnfence.axes import CheckpointType, ReleaseOutcome, ResumeAction, RunState, TurnMode, TurnStatus


async def test_a_greeting_is_answered_without_a_task(rig: Rig) -> None:
    rig.says(
        "turn_decision",
        {
            "mode": "REPLY_ONLY",
            "intent": "SYSTEM_CHAT",
            "agent_id": "",
            "goal_summary": "",
            "reply": "Hello.",
        },
    )
    rig.says("text", "Hello.")
    talk = rig.talk()
    heard = await talk.say("hi")
    assert heard.release is ReleaseOutcome.SUCCESS
    assert isinstance(heard.content.body, r.ChatReply)
    run = await talk.get_run(heard.run_id)
    assert (run.turn_mode, run.run_state, run.task_id) == (TurnMode.REPLY_ONLY, RunState.SUCCESS, "")


async def test_a_question_to_the_user_waits_and_the_answer_goes_on_in_the_same_step(rig: Rig) -> None:
    ask = [("builtin_ask_user", {"question": "Which host?", "expected_fields": ["host"]})]
    rig.task_turn("reader", ask, read_fact("web-1"), concludes())
    talk = rig.talk()
    asked = await talk.say()
    assert asked.question.checkpoint.type is CheckpointType.FOLLOW_UP
    assert "Which host?" in asked.content.text
    assert asked.status is TurnStatus.WAITING
    word = f"web-{new_id()}"
    answered = await talk.act(ResumeAction.REPLY, asked.done.checkpoint_id, text=word)
    assert answered.release is ReleaseOutcome.SUCCESS
    history = str(rig.model.requests[-2]["messages"])
    assert "Which host?" in history
    assert word in history


async def test_the_next_turn_knows_what_the_last_one_found(rig: Rig) -> None:
    rig.task_turn("reader", read_fact(), concludes())
    talk = rig.talk()
    await talk.say("first")
    rig.task_turn("reader", read_fact("other"), concludes())
    rig.model.requests.clear()
    await talk.say("second")
    router = str(rig.model.requests[0]["messages"])
    assert "The load is 42 percent." in router
