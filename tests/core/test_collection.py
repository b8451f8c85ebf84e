"""Lifecycle document 8: collection, information gain, stop reasons."""

from typing import Any

import pytest

from harness_service.core.collection import (
    Collection,
    Permission,
    ReportFault,
    Thresholds,
    ask_for_evidence,
    from_notes,
    is_repeat,
    merged_facts,
    scope_key,
    to_notes,
    with_budget_exhausted,
    with_report,
    with_result,
    with_violation,
)
from turnfence.axes import (
    CallStatus,
    CollectionState,
    EvidenceStatus,
    InformationGain,
    SideEffect,
    StopReason,
)
from turnfence.records import EvidenceHead, Fact

E, G = EvidenceStatus, InformationGain
TWO = Thresholds(no_gain=2, violations=2)


def found(collection: Any, evidence_id: Any, scope: Any = None) -> Any:
    return with_result(collection, evidence_id, scope or evidence_id, E.EVIDENCE_FOUND, TWO).collection


def report(collection: Any, evidence_id: Any, gain: Any, fact: Any = "a fact") -> Any:
    return with_report(collection, evidence_id, gain, fact, TWO)


@pytest.mark.parametrize(
    ("status", "repeat", "gain", "waits"),
    [
        pytest.param(E.NO_EVIDENCE, False, G.NO_GAIN, False, id="lifecycle-8.2-1-empty"),
        pytest.param(E.EVIDENCE_FOUND, True, G.NO_GAIN, False, id="lifecycle-8.2-1-repeat"),
        pytest.param(E.EVIDENCE_FOUND, False, None, True, id="lifecycle-8.2-2"),
        pytest.param(E.ERROR, False, None, False, id="lifecycle-8.2-4-technical"),
        pytest.param(None, False, None, False, id="lifecycle-8.2-4-unresolved"),
    ],
)
def test_information_gain(status: Any, repeat: Any, gain: Any, waits: Any) -> None:
    before = Collection(scopes=frozenset({"s"} if repeat else ()))
    step = with_result(before, "e", "s", status, TWO)
    assert step.gain is gain
    assert (step.collection.unrated == ("e",)) is waits
    assert step.collection.no_gain_streak == (1 if gain else 0)


def test_lifecycle_8_2_gained_clears_the_streak() -> None:
    collection = with_result(Collection(), "e0", "s0", E.NO_EVIDENCE, TWO).collection
    assert collection.no_gain_streak == 1
    step = report(found(collection, "e1"), "e1", G.GAINED, " disk full ")
    assert step.fault is None
    assert step.collection.no_gain_streak == 0
    assert step.collection.facts == (Fact("disk full", ["e1"]),)


def test_lifecycle_8_3_saturated_by_no_gain() -> None:
    collection = report(found(Collection(), "e1"), "e1", G.NO_GAIN).collection
    assert collection.state is CollectionState.COLLECTING
    collection = with_result(collection, "e2", "s2", E.NO_EVIDENCE, TWO).collection
    assert collection.state is CollectionState.SATURATED
    assert collection.stop_reason is StopReason.INFORMATION_SATURATED


def test_lifecycle_8_3_saturated_by_violations() -> None:
    collection = with_violation(Collection(), TWO)
    assert (collection.state, collection.no_gain_streak) == (CollectionState.COLLECTING, 0)
    collection = with_violation(collection, TWO)
    assert collection.state is CollectionState.SATURATED
    assert collection.stop_reason is StopReason.PROGRESS_PROTOCOL_VIOLATED


def test_a_proper_report_ends_a_streak_of_violations() -> None:
    collection = with_violation(found(Collection(), "e1"), TWO)
    collection = report(collection, "e1", G.GAINED).collection
    assert with_violation(collection, TWO).state is CollectionState.COLLECTING


def test_lifecycle_8_3_budget_does_not_saturate() -> None:
    collection = with_budget_exhausted(Collection())
    assert (collection.state, collection.stop_reason) == (
        CollectionState.COLLECTING,
        StopReason.BUDGET_LIMIT_REACHED,
    )


def test_the_first_stop_reason_stays() -> None:
    saturated = with_violation(with_violation(Collection(), TWO), TWO)
    assert with_budget_exhausted(saturated) == saturated
    again = with_result(
        with_result(saturated, "a", "a", E.NO_EVIDENCE, TWO).collection, "b", "b", E.NO_EVIDENCE, TWO
    )
    assert again.collection.stop_reason is StopReason.PROGRESS_PROTOCOL_VIOLATED
    late = report(found(again.collection, "z"), "z", G.GAINED).collection
    assert late.state is CollectionState.SATURATED, "SATURATED is final"


@pytest.mark.parametrize(
    ("evidence_id", "gain", "fact", "fault"),
    [
        ("nowhere", G.GAINED, "x", ReportFault.UNKNOWN_EVIDENCE),
        ("rated", G.GAINED, "x", ReportFault.ALREADY_RATED),
        ("open", G.GAINED, "  ", ReportFault.FACT_MISSING),
        ("open", G.NO_GAIN, "", None),
        ("open", G.GAINED, "x", None),
    ],
)
def test_reports_that_break_the_protocol(evidence_id: Any, gain: Any, fact: Any, fault: Any) -> None:
    collection = report(found(found(Collection(), "rated"), "open"), "rated", G.GAINED).collection
    step = report(collection, evidence_id, gain, fact)
    assert step.fault is fault
    assert step.collection.violation_streak == (1 if fault else 0)
    assert len(step.collection.facts) == (2 if fault is None and gain is G.GAINED else 1)


def test_stop_is_required_once_and_then_enforced() -> None:
    assert ask_for_evidence(Collection()).permission is Permission.ALLOWED
    saturated = with_violation(with_violation(Collection(), TWO), TWO)
    first = ask_for_evidence(saturated)
    assert first.permission is Permission.STOP_REQUIRED
    assert first.collection.state is CollectionState.SATURATED, "a boolean, not a fourth state"
    assert ask_for_evidence(first.collection).permission is Permission.CONTROLLED_STOP


def test_scopes() -> None:
    collection = found(Collection(), "e", scope_key("ops.disk", "hash"))
    assert is_repeat(collection, scope_key("ops.disk", "hash"))
    assert not is_repeat(collection, scope_key("ops.disk", "other"))
    assert not is_repeat(collection, scope_key("ops.other", "hash"))


def head(evidence_id: Any, status: Any = CallStatus.SUCCESS) -> Any:
    return EvidenceHead(
        evidence_id, "t", "n", "ops.disk", SideEffect.NONE, status, business_ok=True, args_hash=evidence_id
    )


def test_it_survives_a_suspension() -> None:
    collection = found(Collection(), "e1", scope_key("ops.disk", "e1"))
    collection = report(collection, "e1", G.GAINED, "one").collection
    collection = found(collection, "e2", scope_key("ops.disk", "e2"))
    notes = to_notes(collection)
    assert from_notes(notes, [head("e1"), head("e2"), head("e3", CallStatus.UNKNOWN)]) == collection
    assert from_notes({}, []) == Collection()


def test_only_what_changed_is_noted() -> None:
    before = report(found(Collection(), "e1"), "e1", G.GAINED, "one").collection
    assert to_notes(before, since=before) == {}
    after = report(found(before, "e2"), "e2", G.GAINED, "two").collection
    assert to_notes(after, since=before) == {"fact:e2": '"two"'}
    waiting = found(before, "e3")
    assert list(to_notes(waiting, since=before)) == ["collection"]


def test_facts_of_several_nodes() -> None:
    one = report(found(Collection(), "e1"), "e1", G.GAINED, "one").collection
    two = report(found(Collection(), "e2"), "e2", G.GAINED, "two").collection
    assert [fact.text for fact in merged_facts([one, two, one])] == ["one", "two"]
