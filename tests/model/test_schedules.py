"""Directed schedules (reliability.md 5.4, and what the random search has found since): each is an order of
steps that once broke a promise, or breaks it again when one property of the protocol is taken away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from tests.model.rules import CORRECT
from tests.model.turn import Plan
from tests.model.world import AFTER, BEFORE, Actor, World

Directed = Callable[[World], None]
SCHEDULES: dict[str, Directed] = {}
# A tool that ignores its key, and no pause between the lease check and the call: then one effect is all.
STRICT = {"tool_dedupes": False, "pause_before_call": False}


def directed(schedule: Directed) -> Directed:
    SCHEDULES[schedule.__name__] = schedule
    return schedule


def world(**changed: bool) -> World:
    return World(replace(CORRECT, **STRICT, **changed), Random(0))  # noqa: S311 - nothing is drawn


def reach(w: World, actor: Actor, place: str) -> None:
    """Run the actor alone to the point before a step; a mutant may not come there."""
    if actor.at != place:
        w.until(actor, place)


def lose(w: World, actor: Actor, place: str, how: int) -> None:
    """Take a step whose store operation is lost BEFORE it happens, or its answer AFTER."""
    reach(w, actor, place)
    w.trip = how
    w.step(actor)
    w.trip = 0


def starts(w: World, place: str, plan: Plan | None = None) -> Actor:
    actor = w.start(plan or Plan())
    reach(w, actor, place)
    return actor


def plays(w: World, plan: Plan | None = None) -> str:
    """A whole turn; its run."""
    actor = w.start(plan or Plan())
    w.until(actor)
    return actor.run


def dies(w: World, actor: Actor) -> None:
    """Both processes, and its lease passes."""
    w.crash_harness(actor)
    w.crash_state()
    w.expire(actor.run)


def sends_again(w: World, actor: Actor) -> None:
    """The caller stops waiting and makes the same call once more; the first one's handler is gone."""
    w.crash_state()
    reach(w, actor, "call")


def end_of(w: World, run: str) -> str:
    return w.ends.get(run, ("", 0))[0]


# --- 5.4 ------------------------------------------------------------------------------------------


@directed
def commit_unknown(w: World) -> None:
    t1 = starts(w, "drain.commit")
    lose(w, t1, "drain.commit", AFTER)
    w.until(t1)
    assert end_of(w, "t1") == "PERSISTED"


@directed
def commit_unknown_with_successor(w: World) -> None:
    t1 = starts(w, "drain.close")
    sends_again(w, t1)
    w.expire("t1")
    plays(w)
    w.until(t1)
    assert end_of(w, "t1") == "PERSISTED" or w.violations


@directed
def zombie_persist(w: World) -> None:
    t1 = starts(w, "drain.commit")
    w.expire("t1")
    t2 = starts(w, "flush.apply")
    w.until(t1)
    w.until(t2)


@directed
def late_stale_check(w: World) -> None:
    t1 = starts(w, "drain.commit")
    w.roll_back(-2)
    w.expire("t1")
    t2 = starts(w, "begin.claim")
    reach(w, t1, "drain.close")
    w.until(t2)


@directed
def laundering(w: World) -> None:
    plays(w)
    old = len(w.dumps) - 1
    plays(w)
    w.roll_back(old)
    t3 = starts(w, "begin.load")
    dies(w, t3)
    plays(w)


@directed
def rollback_inside_one_version(w: World) -> None:
    plays(w)
    w.wipe()
    t2 = starts(w, "flush.apply")
    w.roll_back(-3)  # what was brought back is lost again
    reach(w, t2, "turn.persist")
    w.until(t2)
    plays(w)


@directed
def renew_answer_lost(w: World) -> None:
    t1 = w.start(Plan())
    lose(w, t1, "begin.baseline", BEFORE)
    lose(w, t1, "begin.claim", BEFORE)
    w.until(t1)
    t2 = starts(w, "begin.acquire")
    lose(w, t2, "begin.acquire", AFTER)
    w.until(t2)
    assert end_of(w, "t2") == "PERSISTED"


@directed
def flush_answer_lost(w: World) -> None:
    t1 = starts(w, "flush.apply")
    lose(w, t1, "flush.apply", AFTER)
    w.until(t1)
    assert end_of(w, "t1") == "PERSISTED"


@directed
def paused_before_the_call(w: World) -> None:
    t1 = starts(w, "turn.call", Plan(writes=True))
    w.expire("t1")
    plays(w, Plan(writes=True))
    w.until(t1)
    assert w.effects["a"] == 1 or w.violations


@directed
def believed_too_early(w: World) -> None:
    """Redis loses the lock; the holder's lease lasts, and it may still call."""
    t1 = starts(w, "turn.call", Plan(writes=True))
    w.wipe()
    plays(w, Plan(writes=True))
    w.until(t1)
    assert w.effects["a"] == 1 or w.violations


@directed
def resume_crash(w: World) -> None:
    """The approved write was applied; crash, Redis empty; the user confirms again."""
    plays(w, Plan(writes=True, key="b"))
    assert w.sql.checkpoint == "ask:t1"
    t2 = starts(w, "turn.settle", Plan(writes=True, key="b"))
    assert w.effects == {"b": 1}
    dies(w, t2)
    w.wipe()
    plays(w, Plan(writes=True, key="b"))
    assert w.effects == {"b": 1} or w.violations


@directed
def orphan_in_suspended(w: World) -> None:
    plays(w, Plan(writes=True, key="b"))
    t2 = starts(w, "turn.settle", Plan(writes=True, key="b"))
    dies(w, t2)
    plays(w, Plan(writes=True, key="b"))
    assert w.effects == {"b": 1} or w.violations


@directed
def clean_end_with_running_node(w: World) -> None:
    plays(w, Plan(leaves_node=True))
    assert w.sql.node == "RUNNING"
    assert end_of(w, plays(w)) == "PERSISTED"


@directed
def message_of_a_dead_turn(w: World) -> None:
    t1 = starts(w, "turn.persist")
    dies(w, t1)
    plays(w)
    assert "t1.progress" in w.sql.messages or w.rules != world().rules
    w.wipe()
    plays(w)
    if "t1.progress" not in w.sql.messages:
        w.broken("I11", "t1.progress was shown and never reached SQL")


# --- the end of a turn: prepare, commit, close ------------------------------------------------------


@directed
def pending_is_finished_by_the_next_begin(w: World) -> None:
    t1 = starts(w, "drain.commit")
    w.sql_down = True
    w.until(t1)
    assert end_of(w, "t1") == "PENDING"
    w.sql_down = False
    starts(w, "flush.apply")
    assert w.sql.runs["t1"][0] == "DONE" or w.rules != world().rules


@directed
def prepared_and_not_yet_drained(w: World) -> None:
    """The answer is lost, a successor has the fence and has not drained yet: PENDING, not fenced."""
    t1 = starts(w, "drain.pending")
    sends_again(w, t1)
    w.expire("t1")
    t2 = starts(w, "begin.load")
    w.until(t1)
    w.until(t2)
    assert end_of(w, "t1") == "PENDING" or w.violations


@directed
def close_lost_then_commit_lost(w: World) -> None:
    """Another turn's row says nothing about this batch: it holds that turn's end for the second time."""
    t1 = starts(w, "drain.pending")
    lose(w, t1, "drain.pending", BEFORE)
    w.until(t1)
    t2 = starts(w, "drain.close")
    lose(w, t2, "drain.close", BEFORE)
    reach(w, t2, "turn.persist")
    dies(w, t2)
    t3 = starts(w, "drain.commit")
    lose(w, t3, "drain.commit", BEFORE)
    w.until(t3)


@directed
def older_batch_lands_late(w: World) -> None:
    dies(w, starts(w, "turn.persist"))
    t2 = starts(w, "drain.commit")
    late = w.time_out(t2)
    assert late is not None
    w.until(t2)
    assert end_of(w, "t2") == "PERSISTED"
    w.until(late)


@directed
def end_recorded_after_giving_up(w: World) -> None:
    """The failure is what the caller saw; a commit that comes later must not contradict it."""
    t1 = starts(w, "drain.pending")
    w.crash_state()
    w.expire("t1")
    w.until(t1)
    assert w.sql.runs["t1"][0] == "GIVEN_UP"


@directed
def cleaned_what_has_changed(w: World) -> None:
    """A late begin's drain read a member that its own turn has changed since."""
    dies(w, starts(w, "turn.persist"))
    t2 = starts(w, "drain.commit")
    late = w.time_out(t2)
    assert late is not None
    reach(w, t2, "turn.persist")
    reach(w, late, "begin.load")
    dies(w, t2)
    plays(w, Plan(leaves_node=True))


@directed
def settled_in_sql_alone(w: World) -> None:
    """Redis forgets a settlement; the drain must not open the write again."""
    t1 = starts(w, "turn.persist", Plan(writes=True))
    w.roll_back(-2)
    dies(w, t1)
    plays(w)


# --- begin ----------------------------------------------------------------------------------------


@directed
def begin_that_is_late(w: World) -> None:
    """It must not put back what its own turn, begun by a repeat, has set since."""
    t1 = starts(w, "begin.load")
    late = w.time_out(t1)
    assert late is not None
    reach(w, t1, "drain.values")
    reach(w, late, "begin.s1")
    w.until(t1)


@directed
def run_that_began_again(w: World) -> None:
    """A turn between its two begins must not end it as interrupted."""
    t1 = starts(w, "begin.load")
    sends_again(w, t1)
    w.expire("t1")
    t2 = starts(w, "begin.end_runs")
    w.expire("t2")
    reach(w, t1, "begin.load")
    w.until(t2)
    w.until(t1)
    assert end_of(w, "t1") == "PERSISTED" or w.violations


@directed
def rehydrated_and_lost_again(w: World) -> None:
    plays(w)
    w.wipe()
    t2 = starts(w, "begin.restore")
    w.step(t2)
    w.roll_back(-2)
    w.until(t2)


@directed
def given_up_on_old_data(w: World) -> None:
    """Redis lost the last write that SQL has; a turn that gives up must not make up for it."""
    t1 = starts(w, "persist.prepare")
    old = len(w.dumps) - 1
    w.until(t1)
    w.roll_back(old)
    w.expire()
    t2 = starts(w, "begin.claim")
    w.sql_down = True
    w.expire("t2")
    reach(w, t2, "begin.undo")
    w.crash_state()
    for _ in range(4):
        reach(w, t2, "call")
        w.crash_state()
    w.until(t2)
    w.sql_down = False
    plays(w)


@directed
def cleaned_before_it_was_merged(w: World) -> None:
    """What S2 left in SQL must come back, however many begins die half way."""
    t1 = starts(w, "s2.hot", Plan(writes=True))
    old = len(w.dumps) - 1
    reach(w, t1, "turn.call")
    w.roll_back(old)
    dies(w, t1)
    t2 = starts(w, "begin.end_runs")
    w.crash_state()
    w.expire("t2")
    w.until(t2)
    t3 = starts(w, "begin.end_runs")
    dies(w, t3)
    plays(w)


# --- the tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_protocol_keeps_its_promises_in_a_directed_schedule(name: str) -> None:
    w = world()
    SCHEDULES[name](w)
    w.settle_down()
    assert not w.violations
