"""kill -9 of each of the four processes at each write between lock and unlock (reliability.md 4.B).

A turn is stopped at a write by a proxy that holds its bytes; one process dies there and comes back. Whatever
was hit: the caller gets an end, the next turn runs, nothing is done twice, and both stores agree.
``TURNFENCE_CRASH=all`` takes every process at every point; otherwise each point meets one of them.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import pytest

from state_service.adapters.redis_scripts import READ, REGISTER
from state_service.ports import Scope
from tests.conformance.projection import ColdReader, HotReader
from tests.crash.conftest import Victims, aside
from tests.pair.caller import Conversation, Heard, new_id
from tests.pair.rig import concludes, write
from tests.proxy import Rule, Then
from turnfence import records as r
from turnfence.axes import Durability, FailureReason, ReleaseOutcome, ResumeAction
from turnfence.errors import Reason

pytestmark = [pytest.mark.servers, pytest.mark.crash]

PROCESSES = ("harness", "state", "redis", "sql")
TOOL = "write_thing"
CREATED = concludes("It was created.", "status is created")
RETRY = (Reason.CONVERSATION_BUSY, Reason.STATE_UNAVAILABLE)
ENDS = (*RETRY, Reason.STATE_FENCED, Reason.STATE_LOST)
NEXT_TURN_SECONDS = 15


@dataclass(frozen=True)
class Point:
    """Where the bytes are held: on the line to which store, and what of the write tells it apart."""

    line: str
    pattern: bytes
    armed_by: bytes = b""
    asking: bool = False  # in the turn that asks for the approval, not in the one that has it


# W17, W18, W19 and W21 are one script here, so one point: the close. W04 and W05 are one, too: the begin.
POINTS = {
    "W01": Point("cold", b"UPDATE chat_conversation SET fence_version", asking=True),
    "W02": Point("hot", READ.sha.encode(), asking=True),
    "W03": Point("cold", b"INSERT INTO chat_conversation", asking=True),
    "W04": Point("hot", b"BEGIN"),
    "W05": Point("hot", b"BEGIN", asking=True),
    "W06": Point("cold", b"INSERT INTO chat_message", asking=True),
    "W07": Point("hot", b"activeTaskId", asking=True),
    "W08": Point("hot", b":space"),
    "W09": Point("hot", REGISTER.sha.encode()),
    "W10": Point("cold", b"INSERT INTO tool_call_record"),
    "W10 committed": Point("cold", b"COMMIT", armed_by=b"INSERT INTO tool_call_record"),
    "W12": Point("hot", b'"status":"SUCCESS"'),
    "W13": Point("cold", b"UPDATE tool_call_record"),
    "W14": Point("hot", b"commit:"),
    "W15": Point("cold", b"INSERT INTO task_instance"),
    "W16": Point("cold", b"COMMIT", armed_by=b"INSERT INTO turn_commit"),
    "W17": Point("hot", b"CLEAN"),
}
# Which row of 4.B a point is, where one is about it alone.
ROWS = {
    "W01": "C016", "W02": "C017", "W04": "C019", "W06": "C020", "W07": "C022", "W08": "C023",
    "W10 committed": "C025", "W13": "C028", "W14": "C031", "W16": "C035", "W17": "C037-C038-C041",
}  # fmt: skip
ALL = [(name, process) for name in POINTS for process in PROCESSES]
ONCE = [(name, PROCESSES[place % len(PROCESSES)]) for place, name in enumerate(POINTS)]
CASES = ALL if os.environ.get("TURNFENCE_CRASH") == "all" else ONCE


class Story:
    """A conversation in which one write is asked for, approved and made."""

    def __init__(self, victims: Victims) -> None:
        self.victims, self.rig = victims, victims.rig
        self.talk: Conversation = self.rig.talk("writer")
        self.talk.conversation_id = new_id()
        self.title = new_id()

    async def asks(self) -> Heard:
        self.rig.task_turn("writer", write(TOOL, self.title), CREATED)
        return await self.talk.say(f"write {self.title}")

    async def is_hit(self, name: str, process: str) -> Heard:
        """The turn that was stopped at the point when the process died; how it ended for its caller."""
        point = POINTS[name]
        asked = None if point.asking else await self.asks()
        line = self.victims.line(point.line)
        rule = line.when(point.pattern, Then.HOLD, armed_by=point.armed_by)
        turn = asyncio.create_task(
            self.asks()
            if asked is None
            else self.talk.act(ResumeAction.CONFIRM, asked.done.checkpoint_id, "yes, do it")
        )
        await self._reached(rule, turn)
        await aside(self.victims.kill, process)
        rule.release()
        line.rules.remove(rule)
        heard = await turn if process == "harness" else await self._survives(turn)
        await self.victims.whole()
        return heard

    async def _survives(self, turn: asyncio.Task[Heard]) -> Heard:
        """The dead process comes back while the harness still waits for it."""
        await self.victims.whole()
        return await turn

    async def _reached(self, rule: Rule, turn: asyncio.Task[Heard]) -> None:
        met = asyncio.create_task(rule.met.wait())
        async with asyncio.timeout(10):
            await asyncio.wait({met, turn}, return_when=asyncio.FIRST_COMPLETED)
        met.cancel()
        assert not turn.done(), f"the turn ended without coming there: {turn.result()}"

    async def next_turn(self) -> Heard:
        """The user's next message, as soon as a lease lets it begin. Where the machine is starved, the lease
        of one second may pass in the middle of it: then it says so, and the user asks again."""
        decision = {
            "mode": "REPLY_ONLY",
            "intent": "SYSTEM_CHAT",
            "agent_id": "",
            "goal_summary": "",
            "reply": "I am here.",
        }
        self.rig.says("turn_decision", decision)
        self.rig.says("step", CREATED)
        async with asyncio.timeout(NEXT_TURN_SECONDS):
            while True:
                heard = await self.talk.say("and now?")
                if heard.error is not None:
                    assert heard.error.reason in RETRY, heard.error
                elif heard.of(r.Failure):
                    assert heard.failure is FailureReason.FENCED, heard.of(r.Failure)
                else:
                    return heard
                await asyncio.sleep(0.05)  # as RetryInfo asks, only sooner

    def readers(self) -> tuple[HotReader, ColdReader]:
        scope = Scope(self.talk.principal.organ_id, self.talk.conversation_id)
        return HotReader(self.victims.redis, scope), ColdReader(self.victims.sql_url, scope)


def id_of(name: str, process: str) -> str:
    return "-".join([*([ROWS[name]] if name in ROWS else []), name.replace(" ", "_"), process])


@pytest.mark.parametrize(("name", "process"), CASES, ids=[id_of(*case) for case in CASES])
async def test_a_process_that_dies_at_a_write_leaves_nothing_unknown(
    victims: Victims, name: str, process: str
) -> None:
    story = Story(victims)
    hit = await story.is_hit(name, process)
    check_end(hit)
    following = await story.next_turn()
    assert following.done.durability is Durability.PERSISTED
    assert story.rig.tools.happened(TOOL).count("applied") <= 1
    hot_reader, cold_reader = story.readers()
    hot, (sql, tasks) = hot_reader.read(), cold_reader.read()
    assert [end for end, _ in sql.runs.values() if end == "RUNNING"] == []
    assert following.run_id in sql.commits
    if hit.error is None and hit.release is ReleaseOutcome.SUCCESS:
        assert hit.run_id in sql.commits
    assert (hot.dirty, hot.outbox) == ({}, {})
    assert hot.messages.keys() == sql.messages.keys()
    active = hot_reader.active_task()
    assert {e: c for e, c in sql.calls.items() if tasks[e] == active} == hot.calls
    assert (hot.node, hot.checkpoint) == (sql.node, sql.checkpoint)
    assert not [key for key, ttl in hot_reader.ttls().items() if ttl <= 0]
    cold_reader.close()


def check_end(hit: Heard) -> None:
    """An end that says what it is, and no content that nothing supports."""
    if hit.error is not None:
        broken = hit.error.reason in ENDS or hit.error.retry_after is not None
        assert broken, hit.error
        assert hit.of(r.Done) == []
        return
    if hit.release is not ReleaseOutcome.SUCCESS:
        assert hit.of(r.Content) == []
        return
    assert hit.done.durability in (Durability.PERSISTED, Durability.PENDING)
