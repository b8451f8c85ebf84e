"""kill -9 in the middle of a write: the next turn finds out what happened, and nothing is done twice."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.model_server import Reply
from tests.pair.caller import Conversation, Heard, new_id
from tests.pair.rig import TOOL_SECONDS, Rig, concludes, write
from tests.services import KEPT_SECONDS
from turnfence import records as r
from turnfence.axes import (
    CheckpointType,
    ReleaseOutcome,
    ResumeAction,
    RunState,
    TerminationReason,
)
from turnfence.errors import Reason

CREATED = concludes("It was created.", "status is created")
VICTIMS = pytest.mark.parametrize("victim", ["harness", "state"])
RETRY = (Reason.CONVERSATION_BUSY, Reason.STATE_UNAVAILABLE)


class Crash:
    """A conversation whose approved write was hit by a kill while its tool server worked on it."""

    def __init__(self, rig: Rig, tool: str, victim: str) -> None:
        self.rig = rig
        self.tool = tool
        self.victim = rig.pair.harness if victim == "harness" else rig.pair.state
        self.title = new_id()
        self.talk: Conversation = rig.talk("writer")
        self.run_id = ""

    async def happen(self, *, applied: bool) -> Crash:
        """``applied``: the write took effect before the kill; without it, it never does."""
        self.rig.tools.tell(self.tool, mode="apply_then_hang" if applied else "hang")
        self.rig.task_turn("writer", write(self.tool, self.title), CREATED)
        asked = await self.talk.say(f"write {self.title}")
        confirmed = asyncio.create_task(self.talk.act(ResumeAction.CONFIRM, asked.done.checkpoint_id))
        await self.rig.tools.seen("applied" if applied else "called", self.tool)
        self.victim.kill()
        hit = await self.survivor_sees(confirmed)
        self.run_id = hit.run_id
        self.rig.tools.tell(self.tool, mode="ok")
        return self

    async def survivor_sees(self, confirmed: asyncio.Task[Heard]) -> Heard:
        """A dead harness breaks the call; a live one without its state says that it failed. Never content."""
        hit = await confirmed
        assert hit.of(r.Content) == []
        if self.victim is self.rig.pair.harness:
            assert hit.error is not None
        else:
            assert hit.release is ReleaseOutcome.FAILED
        self.victim.start()
        return hit

    async def next_turn(self, *steps: Reply) -> Heard:
        """The user's next message, as soon as the dead turn's lease lets it begin."""
        self.rig.says(
            "turn_decision",
            {
                "mode": "CONTINUE_TASK",
                "intent": "DIAGNOSIS",
                "agent_id": "",
                "goal_summary": "see to it",
                "reply": "",
            },
        )
        self.rig.says("step", *steps)
        async with asyncio.timeout(20):
            while True:
                heard = await self.talk.say("and now?")
                if heard.error is None:
                    return heard
                assert heard.error.reason in RETRY, heard.error
                await asyncio.sleep(0.05)  # as RetryInfo asks, only sooner

    async def surely_over(self) -> None:
        """Until the dead turn's call cannot be under way any more: its own limit and a lease after its start.
        Before that nobody believes that it did not happen, and nobody repeats it."""
        (called,) = self.rig.tools.events(self.tool)
        over = called["at"] + TOOL_SECONDS + KEPT_SECONDS
        await asyncio.sleep(max(0.0, over - time.time()))  # the rule is about time, nothing else

    async def answer(self, action: ResumeAction, asked: Heard, *steps: Reply) -> Heard:
        self.rig.says("step", *steps)
        return await self.talk.act(action, asked.done.checkpoint_id)

    @property
    def calls(self) -> int:
        return self.rig.tools.happened(self.tool).count("called")

    @property
    def effects(self) -> int:
        return self.rig.tools.happened(self.tool).count("applied")

    @property
    def keys(self) -> set[str]:
        return {event["request_id"] for event in self.rig.tools.events(self.tool)}


@VICTIMS
async def test_a_write_that_can_be_looked_for_is_found_and_not_repeated(rig: Rig, victim: str) -> None:
    crash = await Crash(rig, "write_thing", victim).happen(applied=True)
    heard = await crash.next_turn(CREATED)
    assert rig.tools.happened("find_thing") == ["called"]
    assert heard.release is ReleaseOutcome.SUCCESS
    assert (crash.calls, crash.effects) == (1, 1)
    run = await crash.talk.get_run(crash.run_id)
    assert run.termination_reason in (TerminationReason.INTERRUPTED, TerminationReason.STATE_UNAVAILABLE)
    assert run.run_state is RunState.FAILED


@VICTIMS
async def test_a_write_that_did_not_happen_is_asked_for_again_with_the_same_key(
    rig: Rig, victim: str
) -> None:
    crash = await Crash(rig, "write_thing", victim).happen(applied=False)
    await crash.surely_over()
    asked = await crash.next_turn(write("write_thing", crash.title))
    assert asked.question.checkpoint.type is CheckpointType.APPROVAL
    done = await crash.answer(ResumeAction.CONFIRM, asked, CREATED)
    assert done.release is ReleaseOutcome.SUCCESS
    assert (crash.calls, crash.effects) == (2, 1)
    assert len(crash.keys) == 1


@VICTIMS
async def test_a_write_that_cannot_be_looked_for_is_asked_about_and_CONFIRM_settles_it(
    rig: Rig, victim: str
) -> None:
    crash = await Crash(rig, "write_plain", victim).happen(applied=True)
    asked = await crash.next_turn()
    assert asked.question.checkpoint.type is CheckpointType.VERIFY
    assert crash.title in asked.content.text
    done = await crash.answer(ResumeAction.CONFIRM, asked, concludes("It was created.", "it took effect"))
    assert done.release is ReleaseOutcome.SUCCESS
    assert (crash.calls, crash.effects) == (1, 1)


@VICTIMS
async def test_a_write_that_the_user_says_did_not_happen_needs_a_new_approval_with_the_same_key(
    rig: Rig, victim: str
) -> None:
    crash = await Crash(rig, "write_plain", victim).happen(applied=False)
    await crash.surely_over()
    asked = await crash.next_turn()
    assert asked.question.checkpoint.type is CheckpointType.VERIFY
    again = await crash.answer(ResumeAction.REJECT, asked, write("write_plain", crash.title))
    assert again.question.checkpoint.type is CheckpointType.APPROVAL
    assert crash.calls == 1
    done = await crash.answer(ResumeAction.CONFIRM, again, CREATED)
    assert done.release is ReleaseOutcome.SUCCESS
    assert (crash.calls, crash.effects) == (2, 1)
    assert len(crash.keys) == 1


@VICTIMS
async def test_a_read_turn_that_was_killed_leaves_a_conversation_that_goes_on(rig: Rig, victim: str) -> None:
    rig.tools.tell("read_fact", mode="hang")
    crash = Crash(rig, "read_fact", victim)
    crash.talk = rig.talk("reader")
    crash.talk.conversation_id = new_id()
    rig.task_turn("reader", [("sim__read_fact", {"name": "load"})], concludes())
    going = asyncio.create_task(crash.talk.say("look at it"))
    await rig.tools.seen("called", "read_fact")
    crash.victim.kill()
    await crash.survivor_sees(going)
    rig.tools.forget()
    heard = await crash.next_turn([("sim__read_fact", {"name": "load"})], concludes())
    assert heard.release is ReleaseOutcome.SUCCESS
