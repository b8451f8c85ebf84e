"""Lifecycle document 6: the draft's contract; C109."""

import json
from typing import Any

import jsonschema
import pytest

from harness_service.core.draft import (
    DRAFT_SCHEMA,
    DiagnosisDraft,
    DraftFact,
    InvalidDraft,
    parse_draft,
    to_facts,
    to_json,
)
from turnfence.records import Fact

GOOD = {
    "conclusion": "The disk is full.",
    "facts": [{"text": "/ is 99% full", "evidence_ids": ["e1", "e2"]}, {"text": "x", "evidence_ids": ["e1"]}],
    "missing_info": [],
    "recommendations": ["clean up"],
}


def test_a_draft() -> None:
    draft = parse_draft(json.dumps(GOOD))
    assert draft == parse_draft(GOOD)
    assert draft.has_conclusion
    assert draft.facts[0] == DraftFact("/ is 99% full", ("e1", "e2"))
    assert draft.cited == ("e1", "e2")
    assert to_facts(draft)[1] == Fact("x", ["e1"])
    assert parse_draft(to_json(draft)) == draft
    jsonschema.validate(GOOD, DRAFT_SCHEMA)


@pytest.mark.parametrize("conclusion", [None, "", "  "])
def test_a_blank_conclusion_is_none(conclusion: Any) -> None:
    draft = parse_draft({"conclusion": conclusion, "missing_info": ["which host?"]})
    assert draft.conclusion is None
    assert not draft.has_conclusion


@pytest.mark.parametrize(
    "draft",
    [
        pytest.param("", id="lifecycle-6-empty"),
        pytest.param({}, id="lifecycle-6-empty-object"),
        pytest.param({"conclusion": None, "facts": []}, id="lifecycle-6-says-nothing"),
        pytest.param("The disk is full.", id="lifecycle-6-no-json"),
        pytest.param("[]", id="lifecycle-6-list"),
        pytest.param('{"conclusion":"x"', id="lifecycle-6-broken"),
        pytest.param({**GOOD, "extra": 1}, id="lifecycle-6-unknown-key"),
        pytest.param({**GOOD, "conclusion": 7}, id="lifecycle-6-type"),
        pytest.param({**GOOD, "facts": [{"text": "x", "evidence_ids": "e1"}]}, id="lifecycle-6-ids-type"),
        pytest.param({**GOOD, "facts": [{"evidence_ids": []}]}, id="lifecycle-6-fact-without-text"),
        pytest.param({**GOOD, "facts": [{"text": " ", "evidence_ids": ["e1"]}]}, id="blank-fact"),
        pytest.param({**GOOD, "conclusion": "x" * 8001}, id="too-long"),
        pytest.param({**GOOD, "recommendations": ["x"] * 101}, id="too-many"),
    ],
)
def test_an_invalid_draft_is_dropped(draft: Any) -> None:
    with pytest.raises(InvalidDraft):
        parse_draft(draft)


def test_the_schema_is_strict() -> Any:
    def objects(schema: Any) -> Any:
        if isinstance(schema, dict):
            if schema.get("type") == "object":
                yield schema
            for inner in schema.values():
                yield from objects(inner)

    for schema in objects(DRAFT_SCHEMA):
        assert schema["additionalProperties"] is False
        assert set(schema["required"]) == set(schema["properties"])
    assert set(DRAFT_SCHEMA["properties"]) == set(DiagnosisDraft.__struct_fields__)
