"""What a new task inherits from the ones before it (state document 5.9)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnfence.records import EntityEntry, Prior, TaskRecord

PRIOR_TASKS_MAX = 5
PRIOR_ENTITIES_MAX = 10


def build_prior(
    records: Sequence[TaskRecord],
    entities: Mapping[str, EntityEntry],
    *,
    reason: str,
    tasks_max: int = PRIOR_TASKS_MAX,
    entities_max: int = PRIOR_ENTITIES_MAX,
) -> Prior:
    """The latest tasks and the entities seen last, newest first, with the tasks' artifacts."""
    tasks = sorted(records, key=lambda record: record.closed_at or 0, reverse=True)[:tasks_max]
    recent = sorted(
        entities.items(), key=lambda item: (item[1].seen_at or 0, item[1].mentions, item[0]), reverse=True
    )
    return Prior(
        tasks=tasks,
        entities=dict(recent[:entities_max]),
        artifacts=[artifact for task in tasks for artifact in task.artifacts],
        reason=reason,
    )


def prior_values(prior: Prior | None, expression: str) -> Iterator[tuple[str, Any]]:
    """``(entity key, value)`` for ``<type>[.<attr>]`` (what follows ``prior.``), newest entity first.

    Without an attribute: the id and the display name. ``id`` and ``displayName`` are attributes too.
    """
    kind, _, attribute = expression.partition(".")
    for key, entry in (prior.entities if prior else {}).items():
        entity_type, _, entity_id = key.partition(":")
        if entity_type != kind:
            continue
        attributes = {**json.loads(entry.attrs_json), "id": entity_id, "displayName": entry.display_name}
        for name in [attribute] if attribute else ["id", "displayName"]:
            if attributes.get(name) not in (None, ""):
                yield key, attributes[name]
