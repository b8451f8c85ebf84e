"""Lifecycle 7.2, the system design's table, state 5.4 and 5.5 with D42–D45."""

import json
from typing import Any

import pytest

from harness_service.core.catalogue import EntityRule, OnToolError, ToolContract, VerifyContract
from harness_service.core.entities import Mention
from harness_service.core.invocation import (
    FAILURES,
    WriteVerdict,
    believable_from,
    brief,
    check_arguments,
    classify,
    classify_head,
    detail,
    evaluate_check,
    evaluate_result,
    extracted,
    failed_call,
    is_empty,
    registered,
    settled_by_verdict,
    settled_failure,
    settled_success,
)
from harness_service.core.tool_failure import ToolFailure
from turnfence.axes import CallStatus, EvidenceStatus, FailureKind, InvocationStatus, SideEffect
from turnfence.records import EvidenceHead

C, I, E, K, F = CallStatus, InvocationStatus, EvidenceStatus, FailureKind, ToolFailure  # noqa: E741
HEAD = EvidenceHead("e", "t", "n", "ops.tool", SideEffect.WRITE, C.STARTED, started_at=1000)
TOOL = ToolContract(
    name="ops.tool",
    server="ops",
    remote_name="tool",
    success="status == 'created'",
    empty="length(items) == `0`",
    extract={"tickets": "items[*].id", "bad": "length(missing)", "first": "items[0].id"},
    entities={"ticket": EntityRule(id="id", display_name="title", attrs=("status", "nested"), items="items")},
    mask=("items.phone",),
    artifact=True,
)
PLAIN = ToolContract(name="ops.plain", server="ops", remote_name="plain")


@pytest.mark.parametrize(
    ("status", "ok", "empty", "invocation", "evidence"),
    [
        pytest.param(C.STARTED, None, None, I.PROJECTING, None, id="system-table-1"),
        pytest.param(C.SUCCESS, True, False, I.READY, E.EVIDENCE_FOUND, id="system-table-2"),
        pytest.param(C.SUCCESS, True, None, I.READY, E.EVIDENCE_FOUND, id="system-table-2-no-empty"),
        pytest.param(C.SUCCESS, True, True, I.READY, E.NO_EVIDENCE, id="system-table-3"),
        pytest.param(C.SUCCESS, False, False, I.ERROR, E.ERROR, id="system-table-4-business"),
        pytest.param(C.SUCCESS, None, None, I.ERROR, E.ERROR, id="system-table-4-not-judged"),
        pytest.param(C.FAILED, None, None, I.ERROR, E.ERROR, id="system-table-4-failed"),
        pytest.param(C.TIMEOUT, None, None, I.ERROR, E.ERROR, id="system-table-4-timeout"),
        pytest.param(C.CANCELLED, None, None, I.ERROR, E.ERROR, id="system-table-4-cancelled"),
        pytest.param(C.UNKNOWN, None, None, I.PROJECTING, None, id="system-table-5-unknown"),
        pytest.param(C.UNKNOWN_PRE_CALL, None, None, I.PROJECTING, None, id="system-table-5-pre-call"),
    ],
)
def test_two_axes(status: Any, ok: Any, empty: Any, invocation: Any, evidence: Any) -> None:
    found = classify(status, ok, empty)
    assert (found.invocation, found.evidence) == (invocation, evidence)


@pytest.mark.parametrize("status", C)
@pytest.mark.parametrize("ok", [None, True, False])
@pytest.mark.parametrize("empty", [None, True, False])
def test_lifecycle_16_4_ready_has_found_or_none(status: Any, ok: Any, empty: Any) -> None:
    found = classify(status, ok, empty)
    assert (found.invocation is I.READY) == (found.evidence in (E.EVIDENCE_FOUND, E.NO_EVIDENCE))
    assert (found.invocation is I.PROJECTING) == (found.evidence is None)


@pytest.mark.parametrize(
    ("failure", "kind", "read", "write"),
    [
        pytest.param(F.TIMEOUT, K.TIMEOUT, C.TIMEOUT, C.UNKNOWN, id="state-5.4-1"),
        pytest.param(F.UNREACHABLE, K.TRANSPORT_FAILURE, C.FAILED, C.FAILED, id="state-5.4-2-D42"),
        pytest.param(F.IO_ERROR, K.TRANSPORT_FAILURE, C.FAILED, C.UNKNOWN, id="state-5.4-3"),
        pytest.param(F.UNKNOWN_CALL, K.UNKNOWN, C.FAILED, C.UNKNOWN, id="state-5.4-4"),
        pytest.param(F.MCP_TOOL_ERROR, K.BUSINESS_FAILURE, C.FAILED, C.FAILED, id="state-5.4-5"),
        pytest.param(F.MCP_PARAMETER_ERROR, K.PARAMETER_FAILURE, C.FAILED, C.FAILED, id="state-5.4-6"),
        pytest.param(F.MCP_RPC_ERROR, K.UNKNOWN, C.FAILED, C.UNKNOWN, id="state-5.4-7"),
        pytest.param(F.AUTH, K.AUTH_FAILURE, C.FAILED, C.FAILED, id="auth"),
        pytest.param(F.RATE_LIMIT, K.RATE_LIMIT, C.FAILED, C.FAILED, id="rate-limit"),
        pytest.param(F.TOO_LARGE, K.UNKNOWN, C.FAILED, C.UNKNOWN, id="too-large"),
    ],
)
def test_failures(failure: Any, kind: Any, read: Any, write: Any) -> None:
    assert failed_call(failure, SideEffect.NONE) == failed_call(failure, SideEffect.NONE, OnToolError.UNKNOWN)
    assert (failed_call(failure, SideEffect.NONE).status, failed_call(failure, SideEffect.NONE).kind) == (
        read,
        kind,
    )
    assert (failed_call(failure, SideEffect.WRITE).status, failed_call(failure, SideEffect.WRITE).kind) == (
        write,
        kind,
    )


def test_D43_a_tool_error_may_come_after_its_effect() -> None:
    uncertain = failed_call(F.MCP_TOOL_ERROR, SideEffect.WRITE, OnToolError.UNKNOWN)
    assert (uncertain.status, uncertain.kind) == (C.UNKNOWN, K.BUSINESS_FAILURE)
    assert failed_call(F.UNREACHABLE, SideEffect.WRITE, OnToolError.UNKNOWN).status is C.FAILED
    assert set(FAILURES) == set(ToolFailure)


def test_a_good_result() -> None:
    result = {
        "status": "created",
        "items": [
            {"id": 7, "title": "Disk", "status": "open", "phone": "1", "nested": {}},
            {"id": "", "title": "no id"},
            {"title": "none"},
        ],
    }
    verdict = evaluate_result(TOOL, json.dumps(result))
    assert (verdict.business_ok, verdict.empty, verdict.problem) == (True, False, "")
    assert verdict.extract_counts == {"tickets": 2, "bad": 0, "first": 1}
    assert verdict.entities == (Mention("ticket", "7", "Disk", {"status": "open"}),)
    assert verdict.failure_kind is K.NONE
    assert extracted(TOOL, result) == {"tickets": [7, ""], "bad": None, "first": 7}


@pytest.mark.parametrize(
    ("result", "ok", "empty", "has_problem"),
    [
        pytest.param('{"status":"created","items":[]}', True, True, False, id="empty"),
        pytest.param(
            '{"status":"refused","items":[{"id":1}]}', False, False, False, id="state-5.4-8-business"
        ),
        pytest.param('{"status":"created"}', False, False, True, id="expression-fails"),
        pytest.param("no json", False, False, True, id="not-json"),
        pytest.param('{"status":NaN}', False, False, True, id="nan"),
    ],
)
def test_judgement(result: Any, ok: Any, empty: Any, has_problem: Any) -> None:
    verdict = evaluate_result(TOOL, result)
    assert (verdict.business_ok, verdict.empty, bool(verdict.problem)) == (ok, empty, has_problem)
    assert verdict.entities == ()


@pytest.mark.parametrize(
    ("result", "empty"),
    [
        ("null", True),
        ('""', True),
        ("[]", True),
        ("{}", True),
        ('{"items":[],"text":""}', True),
        ('{"items":[],"count":0}', False),
        ("0", False),
        ("false", False),
        ('[{"a":null}]', False),
    ],
)
def test_without_expressions(result: Any, empty: Any) -> None:
    verdict = evaluate_result(PLAIN, result)
    assert (verdict.business_ok, verdict.empty) == (True, empty)
    assert is_empty(json.loads(result)) is empty


def test_briefs_are_masked_and_bounded() -> None:
    value = {"items": [{"phone": "555", "text": "x" * 500}]}
    shown = brief(value, TOOL.mask)
    assert "555" not in shown
    assert len(shown) == 200
    assert brief({"b": 1, "a": "\u202e"}) == '{"a":"","b":1}'


def test_detail() -> None:
    assert detail("it broke.", "try again") == "it broke. Next step: try again"
    assert detail("it broke", "") == "it broke."
    assert len(detail("x" * 2000, "y")) == 1000


def settle(result: Any, **given: Any) -> Any:
    verdict = evaluate_result(TOOL, result)
    return settled_success(
        HEAD, verdict, tool=TOOL, result_json=result, now_ms=1500, duration_ms=500, **given
    )


def test_settled_success() -> None:
    head = settle('{"status":"created","items":[{"id":1}]}', entities_json="[]")
    assert (head.status, head.business_ok, head.empty, head.artifact) == (C.SUCCESS, True, False, True)
    assert (head.finished_at, head.duration, head.payload_bytes) == (1500, 500, 39)
    assert head.detail == ""
    assert classify_head(head).evidence is E.EVIDENCE_FOUND


def test_settled_business_failure_explains_itself() -> None:
    head = settle('{"status":"refused","items":[]}', reason="quota", next_step="ask for less")
    assert (head.status, head.business_ok, head.failure_kind) == (C.SUCCESS, False, K.BUSINESS_FAILURE)
    assert head.detail == "quota. Next step: ask for less"
    assert not head.artifact
    assert settle("garbage").detail.startswith("the result cannot be read")


@pytest.mark.parametrize(("failure", "ok"), [(F.MCP_TOOL_ERROR, False), (F.TIMEOUT, None)])
def test_settled_failure(failure: Any, ok: Any) -> None:
    head = settled_failure(
        registered(HEAD, now_ms=5),
        failed_call(failure, SideEffect.WRITE),
        error_code="X",
        reason="gone",
        next_step="wait",
        now_ms=9,
        duration_ms=4,
    )
    assert (head.business_ok, head.error_code, head.started_at, head.finished_at) == (ok, "X", 5, 9)
    assert head.detail == "gone. Next step: wait"


VERIFY = VerifyContract(
    tool="ops.find",
    args={"title": "args.title", "id": "key", "absent": "args.nothing"},
    found="length(items) > `0`",
)


def test_check_arguments() -> None:
    assert check_arguments(VERIFY, {"title": "x"}, "k") == {"title": "x", "id": "k"}


@pytest.mark.parametrize(
    ("result", "failed", "asked_at", "verdict"),
    [
        pytest.param('{"items":[1]}', False, 0, WriteVerdict.EFFECTIVE, id="D44-found-early"),
        pytest.param('{"items":[]}', False, 41_000, WriteVerdict.NOT_EFFECTIVE, id="D44-not-found"),
        pytest.param('{"items":[]}', False, 40_999, WriteVerdict.CANNOT_TELL, id="D35-too-early"),
        pytest.param('{"items":[1]}', True, 99_000, WriteVerdict.CANNOT_TELL, id="D44-check-failed"),
        pytest.param("garbage", False, 99_000, WriteVerdict.CANNOT_TELL, id="D44-unreadable"),
        pytest.param("{}", False, 99_000, WriteVerdict.CANNOT_TELL, id="D44-expression-fails"),
    ],
)
def test_a_check_has_three_answers(result: Any, failed: Any, asked_at: Any, verdict: Any) -> None:
    believable = believable_from(1000, tool_timeout_s=10.0, lease_ms=30_000)
    assert believable == 41_000
    assert (
        evaluate_check(VERIFY, result, failed=failed, asked_at_ms=asked_at, believable_from_ms=believable)
        is verdict
    )


def settled(verdict: Any) -> Any:
    unknown = registered(HEAD, now_ms=1000)
    return settled_by_verdict(
        unknown, verdict, not_before_ms=41_000, reason="the user says so", now_ms=50_000
    )


def test_state_5_5_effective() -> None:
    head = settled(WriteVerdict.EFFECTIVE)
    assert (head.status, head.business_ok, head.not_before) == (C.SUCCESS, True, None)
    assert classify_head(head).evidence is E.EVIDENCE_FOUND


def test_state_5_5_not_effective_bars_the_reissue() -> None:
    head = settled(WriteVerdict.NOT_EFFECTIVE)
    assert (head.status, head.business_ok, head.not_before) == (C.FAILED, False, 41_000)
    assert "request the write again" in head.detail


def test_cannot_tell_settles_nothing() -> None:
    with pytest.raises(ValueError, match="settles nothing"):
        settled(WriteVerdict.CANNOT_TELL)
