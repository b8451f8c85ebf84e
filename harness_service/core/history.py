"""A node's history across turns, merged by round from its three sources (state document 3.3).

Each round reads: the user's words and actions, then the model's text and calls, then what the calls
returned. Every call has exactly one return, and every return its call, whatever was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from harness_service.core.invocation import classify_head
from turnfence.axes import CallStatus, DialogueRole, EvidenceStatus
from turnfence.records import DialogueMessage, EvidenceHead, NodeAction


class ActionKind(StrEnum):
    """``NodeAction.kind``."""

    BUILTIN = "builtin"
    REFUSED = "refused"  # refused before any call was made
    DEFERRED = "deferred"  # put off: it waits for an approval, or for another call
    USER = "user"  # the user confirmed or rejected


class UserSaid(msgspec.Struct, frozen=True):
    round: int
    text: str


class UserActed(msgspec.Struct, frozen=True):
    round: int
    action: str
    text: str


class Call(msgspec.Struct, frozen=True):
    call_id: str
    name: str
    arguments: str  # a brief: masked and perhaps cut


class ModelSaid(msgspec.Struct, frozen=True):
    """One reply of the model: its text, its calls, or both."""

    round: int
    text: str
    calls: tuple[Call, ...]


class Returned(msgspec.Struct, frozen=True):
    """``status``: what a tool message says (ok, empty, refused, failed, unknown)."""

    round: int
    call_id: str
    name: str
    status: str
    text: str
    evidence_id: str = ""


Entry = UserSaid | UserActed | ModelSaid | Returned


def node_history(
    dialogue: Sequence[DialogueMessage],
    evidence: Sequence[EvidenceHead],
    actions: Sequence[NodeAction],
    payloads: Mapping[str, str],
) -> list[Entry]:
    """The node's entries in order. ``payloads``: evidence id → full result, for those at hand."""
    rounds = sorted({m.round for m in dialogue} | {e.round for e in evidence} | {a.round for a in actions})
    used: set[str] = set()
    history: list[Entry] = []
    for number in rounds:
        history += _round(
            number,
            [m for m in dialogue if m.round == number],
            sorted((e for e in evidence if e.round == number), key=lambda e: e.started_at or 0),
            [a for a in actions if a.round == number],
            payloads,
            used,
        )
    return history


def returned_text(head: EvidenceHead, payload: str | None) -> str:
    """What a call gave back: the full payload when it succeeded, its detail when not, else the brief."""
    succeeded = head.status is CallStatus.SUCCESS and head.business_ok
    return (payload if succeeded else head.detail) or head.result_brief


def returned_status(head: EvidenceHead) -> str:
    """The status word of a tool message."""
    if head.status in (CallStatus.STARTED, CallStatus.UNKNOWN, CallStatus.UNKNOWN_PRE_CALL):
        return "unknown"
    return _STATUS_WORDS[classify_head(head).evidence or EvidenceStatus.ERROR]


_STATUS_WORDS: Mapping[EvidenceStatus, str] = {
    EvidenceStatus.EVIDENCE_FOUND: "ok",
    EvidenceStatus.NO_EVIDENCE: "empty",
    EvidenceStatus.ERROR: "failed",
}
_ACTION_WORDS: Mapping[str, str] = {
    ActionKind.BUILTIN: "ok",
    ActionKind.REFUSED: "refused",
    ActionKind.DEFERRED: "refused",
}


def _round(
    number: int,
    dialogue: Iterable[DialogueMessage],
    evidence: Iterable[EvidenceHead],
    actions: Iterable[NodeAction],
    payloads: Mapping[str, str],
    used: set[str],
) -> list[Entry]:
    said = list(dialogue)
    done = list(actions)
    users: list[Entry] = [UserSaid(number, m.text) for m in said if m.role is DialogueRole.USER]
    users += [UserActed(number, a.name, a.result_brief) for a in done if a.kind == ActionKind.USER]
    calls: list[Call] = []
    returns: list[Entry] = []
    for head in evidence:
        call_id = _unused(head.call_id or head.evidence_id, head.evidence_id, used)
        calls.append(Call(call_id, head.tool_name, head.args_brief))
        returns.append(
            Returned(
                number,
                call_id,
                head.tool_name,
                returned_status(head),
                returned_text(head, payloads.get(head.evidence_id)),
                head.evidence_id,
            )
        )
    for index, action in enumerate(done):
        if action.kind == ActionKind.USER:
            continue
        own_id = f"action-{number}-{index}"
        call_id = _unused(action.call_id or own_id, own_id, used)
        calls.append(Call(call_id, action.name, action.arguments_brief))
        returns.append(
            Returned(number, call_id, action.name, _ACTION_WORDS[action.kind], action.result_brief)
        )
    text = "\n".join(m.text for m in said if m.role is DialogueRole.AGENT)
    model: list[Entry] = [ModelSaid(number, text, tuple(calls))] if text or calls else []
    return [*users, *model, *returns]


def _unused(wanted: str, otherwise: str, used: set[str]) -> str:
    """A call id that no earlier call has: an approved write repeats the id of the call it was put off as."""
    call_id = otherwise if wanted in used else wanted
    used.add(call_id)
    return call_id
