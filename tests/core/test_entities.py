"""State document 5.8: the entity index."""

import json
from typing import Any

import pytest

from harness_service.core.entities import Mention, from_text, merged, to_text
from turnfence.records import EntityEntry, PutEntity

MENTION = Mention("service", "nginx", "Nginx", {"port": 80})


def merge(
    index: Any, *mentions: Any, evidence_id: Any = "e1", now_ms: Any = 1, entities_max: Any = 200
) -> Any:
    return merged(
        index, mentions, task_id="t", evidence_id=evidence_id, now_ms=now_ms, entities_max=entities_max
    )


def test_a_new_entity() -> None:
    change = merge({}, MENTION)
    entry = EntityEntry("Nginx", '{"port": 80}', "t", "e1", 1, 1)
    assert change.index == {"service:nginx": entry}
    assert change.changes == (PutEntity("service", "nginx", entry),)


def test_a_mention_counts_once_per_evidence() -> None:
    once = merge({}, MENTION)
    assert merge(once.index, MENTION).changes == ()
    twice = merge(once.index, Mention("service", "nginx", "", {"pid": 1}), evidence_id="e2", now_ms=5)
    entry = twice.index["service:nginx"]
    assert (entry.mentions, entry.display_name, entry.seen_at) == (2, "Nginx", 5)
    assert json.loads(entry.attrs_json) == {"port": 80, "pid": 1}


def test_over_the_cap_the_earliest_added_goes() -> None:
    full = merge({}, Mention("a", "1"), Mention("a", "2"))
    change = merge(full.index, Mention("a", "3"), Mention("a", "1"), evidence_id="e2", entities_max=2)
    assert list(change.index) == ["a:2", "a:3"]
    assert [(c.entity_id, c.entry is None) for c in change.changes] == [("3", False), ("1", True)]


def test_more_new_ones_than_the_cap() -> None:
    change = merge({}, *(Mention("a", str(i)) for i in range(5)), entities_max=2)
    assert list(change.index) == ["a:3", "a:4"]
    assert [c.entity_id for c in change.changes] == ["3", "4"]


def test_text_round_trip_and_limit() -> None:
    mentions = (MENTION, Mention("host", "h:1"))
    assert from_text(to_text(mentions)) == mentions
    assert from_text(to_text(mentions, max_chars=90)) == mentions[:1]
    assert to_text([]) == ""
    assert to_text(mentions, max_chars=5) == ""
    assert from_text("") == ()


@pytest.mark.parametrize("text", ["{", "[1]", '[{"type":"x"}]', "7"])
def test_garbage_is_no_entities(text: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's and ours
        from_text(text)
