"""The diagnosis draft: what an agent hands to release. Invalid ones are dropped, never repaired."""

from __future__ import annotations

from typing import Any

import msgspec

from harness_service.core.canonical import JsonRefused, parse_json
from turnfence.records import Fact

TEXT_MAX_CHARS = 8000
ITEMS_MAX = 100

_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}

DRAFT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["conclusion", "facts", "missing_info", "recommendations"],
    "properties": {
        "conclusion": {
            "type": ["string", "null"],
            "description": "null when the evidence is not enough for one",
        },
        "facts": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["text", "evidence_ids"],
                "properties": {
                    "text": {"type": "string"},
                    "evidence_ids": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "the evidence_id of every tool result that shows this fact",
                    },
                },
            },
        },
        "missing_info": {**_STRINGS, "description": "what only the user can tell"},
        "recommendations": _STRINGS,
    },
}


class InvalidDraft(ValueError):
    """Empty, no JSON, or of another form; the text names the fault without quoting the draft."""


class DraftFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str
    evidence_ids: tuple[str, ...] = ()


class DiagnosisDraft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``conclusion`` is None when there is none; a blank one is none."""

    conclusion: str | None = None
    facts: tuple[DraftFact, ...] = ()
    missing_info: tuple[str, ...] = ()
    recommendations: tuple[str, ...] = ()

    @property
    def has_conclusion(self) -> bool:
        return bool(self.conclusion)

    @property
    def cited(self) -> tuple[str, ...]:
        """The cited evidence ids, each once, in order of appearance."""
        return tuple(dict.fromkeys(one for fact in self.facts for one in fact.evidence_ids))


def parse_draft(draft: str | dict[str, Any]) -> DiagnosisDraft:
    """The typed draft from a model's text or an already parsed object."""
    if draft in ("", {}):
        raise InvalidDraft("the draft is empty")
    try:
        value = parse_json(draft) if isinstance(draft, str) else draft
        typed = msgspec.convert(value, DiagnosisDraft)
    except (JsonRefused, msgspec.ValidationError) as fault:
        raise InvalidDraft(str(fault)) from fault
    if typed == DiagnosisDraft():
        raise InvalidDraft("the draft is empty")
    _check_sizes(typed)
    conclusion = (typed.conclusion or "").strip() or None
    return msgspec.structs.replace(typed, conclusion=conclusion)


def to_facts(draft: DiagnosisDraft) -> tuple[Fact, ...]:
    return tuple(Fact(fact.text, list(fact.evidence_ids)) for fact in draft.facts)


def to_json(draft: DiagnosisDraft) -> str:
    """The draft's JSON, as kept in ``TaskNode.result``."""
    return msgspec.json.encode(draft).decode()


def _check_sizes(draft: DiagnosisDraft) -> None:
    texts = [
        draft.conclusion or "",
        *(fact.text for fact in draft.facts),
        *draft.missing_info,
        *draft.recommendations,
    ]
    if any(len(text) > TEXT_MAX_CHARS for text in texts):
        raise InvalidDraft(f"a text is longer than {TEXT_MAX_CHARS} characters")
    if max(len(draft.facts), len(draft.missing_info), len(draft.recommendations)) > ITEMS_MAX:
        raise InvalidDraft(f"a list has more than {ITEMS_MAX} items")
    if any(not fact.text.strip() for fact in draft.facts):
        raise InvalidDraft("a fact has no text")
