"""The entity index: business objects that results named, for later tasks to refer to (state 5.8)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from turnfence.records import EntityEntry, PutEntity

ENTITIES_MAX = 200
ENTITIES_MAX_CHARS = 2048


class Mention(msgspec.Struct, frozen=True):
    """One object that one result named; ``attrs`` holds scalars only."""

    type: str
    id: str
    display_name: str = ""
    attrs: Mapping[str, Any] = {}


class IndexChange(msgspec.Struct, frozen=True):
    """The index after a merge, and what must be stored: new entries and evictions."""

    index: dict[str, EntityEntry]
    changes: tuple[PutEntity, ...]


def to_text(mentions: Iterable[Mention], max_chars: int = ENTITIES_MAX_CHARS) -> str:
    """The JSON text of an evidence head's ``entities``: as many whole mentions as fit; "" for none."""
    kept: list[dict[str, Any]] = []
    text = ""
    for mention in mentions:
        kept.append(
            {
                "type": mention.type,
                "id": mention.id,
                "displayName": mention.display_name,
                "attrs": dict(mention.attrs),
            }
        )
        longer = json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
        if len(longer) > max_chars:
            break
        text = longer
    return text


def from_text(text: str) -> tuple[Mention, ...]:
    """The mentions in a head's ``entities``; raises ``ValueError`` for anything else."""
    if not text:
        return ()
    try:
        return tuple(
            Mention(item["type"], item["id"], item.get("displayName", ""), item.get("attrs", {}))
            for item in json.loads(text)
        )
    except (KeyError, TypeError, AttributeError) as fault:
        raise ValueError("not a list of entities") from fault


def merged(
    index: Mapping[str, EntityEntry],
    mentions: Iterable[Mention],
    *,
    task_id: str,
    evidence_id: str,
    now_ms: int,
    entities_max: int = ENTITIES_MAX,
) -> IndexChange:
    """``index`` with one evidence's mentions.

    The index's order is the order of adding. A mention counts once per evidence id, so that merging
    the same evidence again changes nothing; over ``entities_max`` the earliest added are evicted.
    """
    grown = dict(index)
    touched: dict[tuple[str, str], EntityEntry] = {}
    for mention in mentions:
        key = f"{mention.type}:{mention.id}"
        before = grown.get(key, EntityEntry())
        if before.evidence_id == evidence_id and key in grown:
            continue
        attributes = {**json.loads(before.attrs_json), **mention.attrs}
        entry = EntityEntry(
            display_name=mention.display_name or before.display_name,
            attrs_json=json.dumps(attributes, ensure_ascii=False, sort_keys=True),
            task_id=task_id,
            evidence_id=evidence_id,
            seen_at=now_ms,
            mentions=before.mentions + 1,
        )
        grown[key] = touched[mention.type, mention.id] = entry
    evicted = list(grown)[: max(0, len(grown) - entities_max)]
    for key in evicted:
        del grown[key]
    changes = [
        PutEntity(kind, entity_id, entry)
        for (kind, entity_id), entry in touched.items()
        if f"{kind}:{entity_id}" in grown
    ]
    changes += [PutEntity(*_split(key), entry=None) for key in evicted if key in index]
    return IndexChange(grown, tuple(changes))


def _split(key: str) -> tuple[str, str]:
    entity_type, _, entity_id = key.partition(":")
    return entity_type, entity_id
