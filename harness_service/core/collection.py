"""Whether more evidence may be collected, and why not (lifecycle document 8).

A fold: each thing that happens gives the next ``Collection``. It survives a suspension in the notes of
its node and in the node's evidence. Thresholds are parameters; the settings name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from harness_service.core import notes as notes_names
from harness_service.core.invocation import classify_head
from turnfence.axes import CollectionState, EvidenceStatus, InformationGain, InvocationStatus, StopReason
from turnfence.records import EvidenceHead, Fact


class Thresholds(msgspec.Struct, frozen=True):
    """Consecutive NO_GAINs, and consecutive protocol violations, that saturate a collection."""

    no_gain: int = 3
    violations: int = 3


class ReportFault(StrEnum):
    """Why a progress report is a violation of the protocol; the value tells the model."""

    UNKNOWN_EVIDENCE = "there is no such evidence to report on"
    ALREADY_RATED = "this evidence has been rated already"
    FACT_MISSING = "GAINED needs the fact that was learned"


class Permission(StrEnum):
    """The answer to a model reply that asks for evidence tools."""

    ALLOWED = "ALLOWED"
    STOP_REQUIRED = "STOP_REQUIRED"  # refused once, with the order to finish
    CONTROLLED_STOP = "CONTROLLED_STOP"  # it was told; the loop ends here


class Collection(msgspec.Struct, frozen=True):
    """``unrated``: found evidence that the agent has not judged yet. ``scopes``: what was asked."""

    state: CollectionState = CollectionState.COLLECTING
    stop_reason: StopReason | None = None
    no_gain_streak: int = 0
    violation_streak: int = 0
    stop_delivered: bool = False
    scopes: frozenset[str] = frozenset()
    unrated: tuple[str, ...] = ()
    rated: frozenset[str] = frozenset()
    facts: tuple[Fact, ...] = ()


class ResultStep(msgspec.Struct, frozen=True):
    """``gain``: what the harness itself rated, None when the agent must, or nobody does."""

    collection: Collection
    gain: InformationGain | None


class ReportStep(msgspec.Struct, frozen=True):
    collection: Collection
    fault: ReportFault | None


class PermissionStep(msgspec.Struct, frozen=True):
    collection: Collection
    permission: Permission


def scope_key(tool_name: str, args_hash: str) -> str:
    """What makes two calls the same question: the tool and the hash of its canonical arguments (D80)."""
    return f"{tool_name}|{args_hash}"


def is_repeat(collection: Collection, scope: str) -> bool:
    return scope in collection.scopes


def with_result(
    collection: Collection,
    evidence_id: str,
    scope: str,
    status: EvidenceStatus | None,
    thresholds: Thresholds,
) -> ResultStep:
    """A tool has answered. NO_EVIDENCE and an exact repeat are NO_GAIN by the harness's own judgement;
    other evidence waits for the agent's; a technical failure says nothing."""
    if status is None or status is EvidenceStatus.ERROR:
        return ResultStep(collection, None)
    repeat = is_repeat(collection, scope)
    seen = _replace(collection, scopes=collection.scopes | {scope})
    if repeat or status is EvidenceStatus.NO_EVIDENCE:
        rated = _replace(seen, rated=seen.rated | {evidence_id})
        return ResultStep(_no_gain(rated, thresholds), InformationGain.NO_GAIN)
    return ResultStep(_replace(seen, unrated=(*seen.unrated, evidence_id)), None)


def with_report(
    collection: Collection,
    evidence_id: str,
    gain: InformationGain,
    fact: str,
    thresholds: Thresholds,
) -> ReportStep:
    """The agent judges one evidence; a report that breaks the protocol is counted as a violation."""
    fault = _report_fault(collection, evidence_id, gain, fact)
    if fault is not None:
        return ReportStep(with_violation(collection, thresholds), fault)
    rated = _replace(
        collection,
        unrated=tuple(one for one in collection.unrated if one != evidence_id),
        rated=collection.rated | {evidence_id},
        violation_streak=0,
    )
    if gain is InformationGain.NO_GAIN:
        return ReportStep(_no_gain(rated, thresholds), None)
    facts = (*rated.facts, Fact(fact.strip(), [evidence_id]))
    return ReportStep(_replace(rated, facts=facts, no_gain_streak=0), None)


def with_violation(collection: Collection, thresholds: Thresholds) -> Collection:
    """One violation of the progress protocol (also: a reply that leaves found evidence unrated)."""
    counted = _replace(collection, violation_streak=collection.violation_streak + 1)
    if counted.violation_streak >= thresholds.violations:
        return _saturated(counted, StopReason.PROGRESS_PROTOCOL_VIOLATED)
    return counted


def with_budget_exhausted(collection: Collection) -> Collection:
    """The run's budget is gone: a stop reason, but no SATURATED (8.1)."""
    if collection.stop_reason is not None:
        return collection
    return _replace(collection, stop_reason=StopReason.BUDGET_LIMIT_REACHED)


def ask_for_evidence(collection: Collection) -> PermissionStep:
    """Asked once for each model reply that contains evidence tools, not once for each call in it."""
    if collection.state is CollectionState.COLLECTING:
        return PermissionStep(collection, Permission.ALLOWED)
    if not collection.stop_delivered:
        return PermissionStep(_replace(collection, stop_delivered=True), Permission.STOP_REQUIRED)
    return PermissionStep(collection, Permission.CONTROLLED_STOP)


def merged_facts(collections: Sequence[Collection]) -> tuple[Fact, ...]:
    """The progress of several nodes, in order, each fact once."""
    facts: dict[tuple[str, ...], Fact] = {}
    for collection in collections:
        for fact in collection.facts:
            facts.setdefault((fact.text, *fact.evidence_ids), fact)
    return tuple(facts.values())


def to_notes(collection: Collection, since: Collection | None = None) -> dict[str, str]:
    """The node notes that changed since ``since``: its counters, and each new fact under its own name,
    so that a step's bytes do not grow with the number of facts."""
    known = len(since.facts) if since else 0
    notes = {
        notes_names.FACT_PREFIX + fact.evidence_ids[0]: msgspec.json.encode(fact.text).decode()
        for fact in collection.facts[known:]
    }
    standing = _standing(collection)
    if since is None or _standing(since) != standing:
        notes[notes_names.COLLECTION] = msgspec.json.encode(standing).decode()
    return notes


def from_notes(notes: Mapping[str, str], evidence: Iterable[EvidenceHead]) -> Collection:
    """The collection of a node as it was left; ``evidence``: the heads of its calls."""
    standing = (
        msgspec.json.decode(notes[notes_names.COLLECTION], type=_Standing)
        if notes_names.COLLECTION in notes
        else _standing(Collection())
    )
    ready = [head for head in evidence if classify_head(head).invocation is InvocationStatus.READY]
    prefix = notes_names.FACT_PREFIX
    return Collection(
        state=standing.state,
        stop_reason=standing.stop_reason,
        no_gain_streak=standing.no_gain_streak,
        violation_streak=standing.violation_streak,
        stop_delivered=standing.stop_delivered,
        scopes=frozenset(scope_key(head.tool_name, head.args_hash) for head in ready),
        unrated=standing.unrated,
        rated=frozenset(head.evidence_id for head in ready) - set(standing.unrated),
        facts=tuple(
            Fact(msgspec.json.decode(text, type=str), [name.removeprefix(prefix)])
            for name, text in notes.items()
            if name.startswith(prefix)
        ),
    )


class _Standing(msgspec.Struct, frozen=True):
    """The part of a collection that its node's evidence does not tell."""

    state: CollectionState
    stop_reason: StopReason | None
    no_gain_streak: int
    violation_streak: int
    stop_delivered: bool
    unrated: tuple[str, ...]


def _standing(collection: Collection) -> _Standing:
    return _Standing(
        collection.state,
        collection.stop_reason,
        collection.no_gain_streak,
        collection.violation_streak,
        collection.stop_delivered,
        collection.unrated,
    )


def _report_fault(
    collection: Collection, evidence_id: str, gain: InformationGain, fact: str
) -> ReportFault | None:
    if evidence_id in collection.rated:
        return ReportFault.ALREADY_RATED
    if evidence_id not in collection.unrated:
        return ReportFault.UNKNOWN_EVIDENCE
    if gain is InformationGain.GAINED and not fact.strip():
        return ReportFault.FACT_MISSING
    return None


def _no_gain(collection: Collection, thresholds: Thresholds) -> Collection:
    counted = _replace(collection, no_gain_streak=collection.no_gain_streak + 1)
    if counted.no_gain_streak >= thresholds.no_gain:
        return _saturated(counted, StopReason.INFORMATION_SATURATED)
    return counted


def _saturated(collection: Collection, reason: StopReason) -> Collection:
    """SATURATED is final, and so is its first reason."""
    if collection.state is CollectionState.SATURATED:
        return collection
    return _replace(collection, state=CollectionState.SATURATED, stop_reason=collection.stop_reason or reason)


def _replace(collection: Collection, **changes: Any) -> Collection:
    return msgspec.structs.replace(collection, **changes)
