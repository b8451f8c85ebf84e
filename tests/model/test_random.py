"""The protocol under random schedules (reliability.md 5.1), and without each of its promises (5.5).

``TURNFENCE_SCHEDULES`` sets how many; a violation names its seed and is told step by step.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace

import pytest

from tests.model.protocol import campaign, replay, run
from tests.model.rules import CORRECT, Rules
from tests.model.test_schedules import SCHEDULES, STRICT, world

TOTAL = int(os.environ.get("TURNFENCE_SCHEDULES", "50000"))
PART = 5_000
ACKNOWLEDGED = 0.3  # of the turns that began: a protocol that gives up always keeps its promises too

# Property of the protocol → what breaks a promise without it: a directed schedule, or a random one by seed.
MUTANTS: dict[str, str | int] = {
    "flush_compare": "believed_too_early",
    "compare_first": 9,
    "flush_sequence": "flush_answer_lost",
    "seen_seq": "rollback_inside_one_version",
    "renew_identity": "renew_answer_lost",
    "unlock_compare": 29,
    "clean_compare": 18029,
    "stamp_guard": 8227,
    "sql_claim": "zombie_persist",
    "base_max": 0,
    "renew_first": 1182,
    "detect_stale": "late_stale_check",
    "stale_after_claim": "late_stale_check",
    "data_stamp": "given_up_on_old_data",
    "stamp_seq": "given_up_on_old_data",
    "drain_at_begin": "pending_is_finished_by_the_next_begin",
    "stale_rechecked": 9289,
    "begin_once": 1965,
    "ends_fenced": "run_that_began_again",
    "union": "settled_in_sql_alone",
    "union_all": "cleaned_before_it_was_merged",
    "open_calls": 1484,
    "normalise_always": "clean_end_with_running_node",
    "s1_fenced": 9,
    "s2_sql": "resume_crash",
    "s2_fenced": 38,
    "s2_dedupe": 42,
    "lease_check": "paused_before_the_call",
    "quarantine": "believed_too_early",
    "unknown_blocks": 6,
    "settled_wins": "settled_in_sql_alone",
    "persist_cas": "zombie_persist",
    "persist_in_order": 18689,
    "commit_retried": "close_lost_then_commit_lost",
    "commit_token": "commit_unknown_with_successor",
    "prepared_is_pending": "prepared_and_not_yet_drained",
    "first_end_counts": "end_recorded_after_giving_up",
    "values_checked": 56,
    "abandon_unstamped": 14600,
    "close_unstamped": 34609,
    "own_end_checked": 21843,
}


@pytest.mark.parametrize("first", range(0, TOTAL, PART))
def test_no_schedule_breaks_a_promise(first: int) -> None:
    report = campaign(range(first, min(first + PART, TOTAL)))
    for seed, _ in report.first.values():
        pytest.fail(replay(seed))
    assert report.acknowledged >= ACKNOWLEDGED * report.begun


def test_every_property_of_the_protocol_has_a_mutant() -> None:
    assert MUTANTS.keys() == {field.name for field in fields(Rules)} - STRICT.keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_without_this_property_a_promise_is_broken(name: str) -> None:
    killer = MUTANTS[name]
    if isinstance(killer, int):
        assert run(killer, replace(CORRECT, **{name: False})).violations
        return
    w = world(**{name: False})
    SCHEDULES[killer](w)
    w.settle_down()
    assert w.violations
