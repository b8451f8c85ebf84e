"""Arguments: state 5.4 (keys), 5.7 (refusals), D37, D49, D56, C065, C067, C125."""

import json
from typing import Any

import pytest

from harness_service.core.arguments import (
    ArgumentsRefused,
    EvidencePayload,
    KnownValues,
    UserText,
    bind_inputs,
    check_schema,
    check_sources,
    idempotency_key,
    injected,
    offered_schema,
    parse_arguments,
    prepare,
)
from harness_service.core.canonical import digest
from harness_service.core.catalogue import ArgumentRule, ToolContract
from turnfence.axes import SideEffect, SourceType
from turnfence.records import EntityEntry, Prior, Source, Sourced

SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["title", "operator", "request_id"],
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "service": {"type": "string"},
        "port": {"type": "integer"},
        "operator": {"type": "string"},
        "request_id": {"type": "string"},
    },
}
TOOL = ToolContract(
    name="ops.write",
    server="ops",
    remote_name="write",
    side_effect=SideEffect.WRITE,
    idempotency_key=("title", "service"),
    pass_key_as="request_id",
    args={
        "service": ArgumentRule(
            sources=("user", "evidence", "shared.service"), required=True, label="Service"
        ),
        "operator": ArgumentRule(inject="platform.user_id"),
    },
)
PLATFORM = {"user_id": "u1", "organ_id": "o", "conversation_id": "c", "run_id": "r"}
USER = KnownValues(user_texts=(UserText("m1", "restart nginx on port 8080 please"),))


def test_a_prepared_call() -> None:
    call = prepare(TOOL, SCHEMA, '{"service":"nginx","title":"x","port":8080.0}', USER, PLATFORM)
    assert call.args_json == '{"operator":"u1","port":8080,"service":"nginx","title":"x"}'
    assert call.args_hash == digest(call.arguments)
    assert json.loads(call.wire_json) == {**call.arguments, "request_id": call.idempotency_key}
    assert call.sources["service"] == Source(SourceType.USER, ref="m1")
    assert call.sources["operator"] == Source(SourceType.PLATFORM, ref="platform.user_id")
    assert call.sources["title"].type is SourceType.MODEL


def test_the_model_cannot_set_what_the_platform_sets() -> None:
    forged = '{"service":"nginx","title":"x","operator":"root","request_id":"mine"}'
    honest = prepare(TOOL, SCHEMA, '{"service":"nginx","title":"x"}', USER, PLATFORM)
    assert prepare(TOOL, SCHEMA, forged, USER, PLATFORM) == honest
    assert injected(TOOL, PLATFORM) == {"operator": "u1"}
    with pytest.raises(KeyError):
        injected(TOOL, {})


def test_the_model_is_not_offered_them() -> None:
    offered = offered_schema(TOOL, SCHEMA)
    assert sorted(offered["properties"]) == ["port", "service", "title"]
    assert offered["required"] == ["title"]
    assert "operator" in SCHEMA["properties"], "the original is not touched"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("{", "not valid JSON", id="broken"),
        pytest.param("[1]", "no JSON object", id="list"),
        pytest.param('{"a":1,"a":2}', "twice", id="duplicate"),
        pytest.param('{"a":NaN}', "NaN", id="nan"),
        pytest.param('{"a":' + "[" * 70 + "]" * 70 + "}", "nested deeper", id="deep"),
    ],
)
def test_C125_refused(text: Any, reason: Any) -> None:
    with pytest.raises(ArgumentsRefused) as refused:
        parse_arguments(text)
    assert reason in refused.value.reason
    assert refused.value.next_step
    assert parse_arguments("") == {}


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ('{"service":"nginx"}', "'title' is a required property"),
        ('{"service":"nginx","title":7}', "title"),
        ('{"service":"nginx","title":"x","port":"80"}', "port"),
        ('{"service":"nginx","title":"x","other":1}', "other"),
    ],
)
def test_arguments_that_fail_the_schema(arguments: Any, place: Any) -> None:
    with pytest.raises(ArgumentsRefused) as refused:
        prepare(TOOL, SCHEMA, arguments, USER, PLATFORM)
    assert place in refused.value.reason
    assert "schema" in refused.value.next_step


def test_references_are_never_fetched() -> None:
    with pytest.raises(ArgumentsRefused, match="own schema"):
        check_schema({"properties": {"a": {"$ref": "http://127.0.0.1:9/schema"}}}, {"a": 1})
    with pytest.raises(ArgumentsRefused, match="own schema"):
        check_schema({"type": "no such type"}, {})
    local = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    check_schema(local, {"a": 1})
    with pytest.raises(ArgumentsRefused, match="a: "):
        check_schema(local, {"a": "x"})


# --- identity ---------------------------------------------------------------------------------------


def key(arguments: Any, **changes: Any) -> Any:
    tool = ToolContract(
        **{"name": "t", "server": "s", "remote_name": "t", "idempotency_key": ("a", "b.c"), **changes}
    )
    return idempotency_key(tool, arguments)


FULL = {"a": 1, "b": {"c": 2}, "note": "x"}


@pytest.mark.parametrize(
    ("other", "same"),
    [
        pytest.param({"note": "x", "b": {"c": 2}, "a": 1}, True, id="C065-order"),
        pytest.param({**FULL, "note": "another"}, True, id="only-the-paths-count"),
        pytest.param({**FULL, "a": 1.0}, True, id="C065-1-and-1.0"),
        pytest.param({**FULL, "a": "1"}, False, id="D37-typed"),
        pytest.param({**FULL, "a": 2}, False, id="other-value"),
        pytest.param({**FULL, "a": None}, False, id="C065-null"),
    ],
)
def test_the_key_over_paths(other: Any, same: Any) -> None:
    assert (key(FULL) == key(other)) is same


def test_C067_a_missing_path_makes_no_partial_key() -> None:
    one, two = {"a": 1, "note": "x"}, {"a": 1, "note": "y"}
    assert key(one) != key(two), "all arguments count when a path is missing"
    assert key(one) == key(one, idempotency_key=())
    assert key({"a": 1, "b": {"c": None}}) != key({"a": 1, "b": {}})


def test_the_key_knows_its_tool_and_the_order_of_paths_does_not_count() -> None:
    assert key(FULL) != key(FULL, name="other")
    assert key(FULL) == key(FULL, idempotency_key=("b.c", "a"))
    assert key({"a": "1|b=2", "b": {"c": ""}}) != key({"a": "1", "b": {"c": "2"}}), "D37"


# --- sources ----------------------------------------------------------------------------------------

KNOWN = KnownValues(
    user_texts=(UserText("m1", "Look at Nginx, 查看服务redis的端口8080，threshold 80.5"),),
    evidence=(
        EvidencePayload("e1", {"items": [{"name": "web-01", "port": 443}], "log": "from 10.0.0.7 at noon"}),
    ),
    shared={"service": Sourced('"mysql"', Source(SourceType.NODE_OUTPUT))},
    session={"region": Sourced('{"code":"eu"}', Source(SourceType.NODE_OUTPUT))},
    prior=Prior(entities={"service:kafka": EntityEntry("Kafka", '{"port":9092}')}),
)


@pytest.mark.parametrize(
    ("source", "value", "kind", "ref"),
    [
        ("user", "nginx", SourceType.USER, "m1"),
        ("user", "redis", SourceType.USER, "m1"),
        ("user", 8080, SourceType.USER, "m1"),
        ("user", ["nginx", "redis"], SourceType.USER, "m1"),
        ("user", {"a": "nginx"}, SourceType.USER, "m1"),
        ("evidence", "web-01", SourceType.EVIDENCE, "e1"),
        ("evidence", 443, SourceType.EVIDENCE, "e1"),
        ("evidence", "10.0.0.7", SourceType.EVIDENCE, "e1"),
        ("evidence.items[*].name", "web-01", SourceType.EVIDENCE, "e1"),
        ("shared.service", "mysql", SourceType.SHARED, "service"),
        ("session.region", "eu", SourceType.SESSION, "region"),
        ("prior.service", "kafka", SourceType.PRIOR_TASK, "service:kafka"),
        ("prior.service", "Kafka", SourceType.PRIOR_TASK, "service:kafka"),
        ("prior.service.port", 9092, SourceType.PRIOR_TASK, "service:kafka"),
        ("model", "anything", SourceType.MODEL, ""),
    ],
)
def test_a_value_from_an_allowed_source(source: Any, value: Any, kind: Any, ref: Any) -> None:
    found = check_sources({"x": ArgumentRule(sources=(source,))}, {"x": value}, KNOWN)["x"]
    assert (found.type, found.ref) == (kind, ref)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("user", "mongo"),
        ("user", "ngin"),
        ("user", 80),
        ("user", 808),
        ("user", ["nginx", "mongo"]),
        ("user", True),
        ("evidence", "web-0"),
        ("evidence", 44),
        ("evidence.items[*].name", 443),
        ("evidence.log[", "noon"),
        ("shared.service", "nginx"),
        ("shared.other", "mysql"),
        ("session.region", "us"),
        ("prior.service", "redis"),
        ("prior.host", "kafka"),
        ("prior.service.port", 8080),
    ],
)
def test_a_value_with_none_of_its_sources_is_refused(source: Any, value: Any) -> None:
    with pytest.raises(ArgumentsRefused) as refused:
        check_sources({"x": ArgumentRule(sources=(source,), label="Thing")}, {"x": value}, KNOWN)
    assert "none of its allowed sources" in refused.value.reason
    assert "Thing" in refused.value.next_step


def test_the_first_allowed_source_is_recorded() -> None:
    rules = {"x": ArgumentRule(sources=("shared.service", "model"))}
    assert check_sources(rules, {"x": "mysql"}, KNOWN)["x"].type is SourceType.SHARED
    assert check_sources(rules, {"x": "else"}, KNOWN)["x"].type is SourceType.MODEL


@pytest.mark.parametrize("arguments", [{}, {"x": None}, {"x": ""}])
def test_required_is_required(arguments: Any) -> None:
    with pytest.raises(ArgumentsRefused, match="x is required"):
        check_sources({"x": ArgumentRule(sources=("user",), required=True)}, arguments, KNOWN)
    assert "x" not in check_sources({"x": ArgumentRule(sources=("user",))}, {}, KNOWN)


def test_no_sources_means_any() -> None:
    assert check_sources({"x": ArgumentRule()}, {"x": "any", "y": 1}, KNOWN)["x"].type is SourceType.MODEL


def test_inputs_are_bound_without_a_model() -> None:
    rules = {
        "service": ArgumentRule(sources=("user", "shared.service")),
        "name": ArgumentRule(sources=("evidence.items[0].name",)),
        "kafka": ArgumentRule(sources=("prior.service",)),
        "none": ArgumentRule(sources=("user", "shared.other")),
    }
    assert bind_inputs(rules, KNOWN) == {
        "service": Sourced('"mysql"', Source(SourceType.SHARED, ref="service")),
        "name": Sourced('"web-01"', Source(SourceType.EVIDENCE, ref="e1", path="items[0].name")),
        "kafka": Sourced('"kafka"', Source(SourceType.PRIOR_TASK, ref="service:kafka")),
    }
