"""One call of a business tool: what its outcome means (lifecycle 7, state 5.4 and 5.5).

Two axes, mapped by one function: how far the call came (CallStatus), and what it may be used for
(InvocationStatus, EvidenceStatus). A write is FAILED only when it provably had no effect (D42).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import jmespath
import jmespath.exceptions
import jmespath.parser
import msgspec

from harness_service.core.canonical import JsonRefused, canonical, parse_json
from harness_service.core.catalogue import EntityRule, OnToolError, ToolContract, VerifyContract
from harness_service.core.display import clean, cut, masked
from harness_service.core.entities import Mention
from harness_service.core.tool_failure import ToolFailure
from turnfence.axes import CallStatus, EvidenceStatus, FailureKind, InvocationStatus, SideEffect
from turnfence.records import EvidenceHead

BRIEF_MAX_CHARS = 200
DETAIL_MAX_CHARS = 1000
RESULT_MAX_KEYS = 1_000_000  # a result is bounded in bytes before it gets here

# --- the two axes -----------------------------------------------------------------------------------


class Classification(msgspec.Struct, frozen=True):
    invocation: InvocationStatus
    evidence: EvidenceStatus | None


PROJECTING = Classification(InvocationStatus.PROJECTING, None)
FOUND = Classification(InvocationStatus.READY, EvidenceStatus.EVIDENCE_FOUND)
NOT_FOUND = Classification(InvocationStatus.READY, EvidenceStatus.NO_EVIDENCE)
ERROR = Classification(InvocationStatus.ERROR, EvidenceStatus.ERROR)

#: CallStatus → classification; SUCCESS also depends on the business outcome.
CLASSIFICATIONS: Mapping[CallStatus, Classification] = {
    CallStatus.STARTED: PROJECTING,
    CallStatus.FAILED: ERROR,
    CallStatus.TIMEOUT: ERROR,
    CallStatus.CANCELLED: ERROR,
    CallStatus.UNKNOWN: PROJECTING,
    CallStatus.UNKNOWN_PRE_CALL: PROJECTING,
}


def classify(
    status: CallStatus, business_ok: bool | None = None, empty: bool | None = None
) -> Classification:
    """The table of the system design. A SUCCESS whose business outcome is not known is an ERROR."""
    if status is not CallStatus.SUCCESS:
        return CLASSIFICATIONS[status]
    if not business_ok:
        return ERROR
    return NOT_FOUND if empty else FOUND


def classify_head(head: EvidenceHead) -> Classification:
    return classify(head.status, head.business_ok, head.empty)


# --- a call that failed -----------------------------------------------------------------------------


class FailureRule(msgspec.Struct, frozen=True):
    """One row of state 5.4's mapping with D42 and D43."""

    kind: FailureKind
    read: CallStatus
    write: CallStatus


FAILURES: Mapping[ToolFailure, FailureRule] = {
    ToolFailure.TIMEOUT: FailureRule(FailureKind.TIMEOUT, CallStatus.TIMEOUT, CallStatus.UNKNOWN),
    ToolFailure.UNREACHABLE: FailureRule(FailureKind.TRANSPORT_FAILURE, CallStatus.FAILED, CallStatus.FAILED),
    ToolFailure.IO_ERROR: FailureRule(FailureKind.TRANSPORT_FAILURE, CallStatus.FAILED, CallStatus.UNKNOWN),
    ToolFailure.UNKNOWN_CALL: FailureRule(FailureKind.UNKNOWN, CallStatus.FAILED, CallStatus.UNKNOWN),
    # A tool error of a write means what the contract's on_error says; FAILED is its default.
    ToolFailure.MCP_TOOL_ERROR: FailureRule(
        FailureKind.BUSINESS_FAILURE, CallStatus.FAILED, CallStatus.FAILED
    ),
    ToolFailure.MCP_PARAMETER_ERROR: FailureRule(
        FailureKind.PARAMETER_FAILURE, CallStatus.FAILED, CallStatus.FAILED
    ),
    ToolFailure.MCP_RPC_ERROR: FailureRule(FailureKind.UNKNOWN, CallStatus.FAILED, CallStatus.UNKNOWN),
    # Refused at the door: nothing was executed.
    ToolFailure.AUTH: FailureRule(FailureKind.AUTH_FAILURE, CallStatus.FAILED, CallStatus.FAILED),
    ToolFailure.RATE_LIMIT: FailureRule(FailureKind.RATE_LIMIT, CallStatus.FAILED, CallStatus.FAILED),
    # It answered, and nobody can read the answer.
    ToolFailure.TOO_LARGE: FailureRule(FailureKind.UNKNOWN, CallStatus.FAILED, CallStatus.UNKNOWN),
}


class CallFailure(msgspec.Struct, frozen=True):
    status: CallStatus
    kind: FailureKind


def failed_call(
    failure: ToolFailure, side_effect: SideEffect, on_error: OnToolError = OnToolError.FAILED
) -> CallFailure:
    """What a failed call leaves: the status of its evidence and the class of its failure."""
    rule = FAILURES[failure]
    if side_effect is SideEffect.NONE:
        return CallFailure(rule.read, rule.kind)
    if failure is ToolFailure.MCP_TOOL_ERROR and on_error is OnToolError.UNKNOWN:
        return CallFailure(CallStatus.UNKNOWN, rule.kind)
    return CallFailure(rule.write, rule.kind)


# --- a call that returned ---------------------------------------------------------------------------


class ResultVerdict(msgspec.Struct, frozen=True):
    """What the contract's expressions say about a result. ``value``: the parsed result.

    ``problem``: why it could not be judged (not JSON, an expression that fails on it); then it is
    no business success.
    """

    business_ok: bool
    empty: bool
    extract_counts: Mapping[str, int] = {}
    entities: tuple[Mention, ...] = ()
    value: Any = None
    problem: str = ""

    @property
    def failure_kind(self) -> FailureKind:
        return FailureKind.NONE if self.business_ok else FailureKind.BUSINESS_FAILURE


def evaluate_result(tool: ToolContract, result_json: str) -> ResultVerdict:
    """Judge a returned result by the tool's ``success``, ``empty``, ``extract`` and ``entities``."""
    try:
        value = parse_json(result_json, max_keys=RESULT_MAX_KEYS)
        business_ok = _holds(tool.success, value) if tool.success else True
        empty = _holds(tool.empty, value) if tool.empty else is_empty(value)
    except (JsonRefused, jmespath.exceptions.JMESPathError) as fault:
        return ResultVerdict(business_ok=False, empty=False, problem=_problem(fault))
    return ResultVerdict(
        business_ok=business_ok,
        empty=empty,
        extract_counts={name: _count(path, value) for name, path in tool.extract.items()},
        entities=_mentions(tool.entities, value) if business_ok and not empty else (),
        value=value,
    )


def extracted(tool: ToolContract, value: Any) -> dict[str, Any]:
    """The contract's extracts of a result; one whose expression fails on it is None."""
    return {name: _search_or_none(path, value) for name, path in tool.extract.items()}


def is_empty(value: Any) -> bool:
    """Whether a result says nothing at all: null, or nothing but empty texts, lists and objects."""
    if isinstance(value, dict):
        return all(is_empty(item) for item in value.values())
    return value is None or (isinstance(value, str | list) and len(value) == 0)


def brief(value: Any, mask: Sequence[str] = (), max_chars: int = BRIEF_MAX_CHARS) -> str:
    """Arguments or a result in one short line: masked first, then cleaned, then cut."""
    return clean(canonical(masked(value, mask)), max_chars)


def detail(reason: str, next_step: str, max_chars: int = DETAIL_MAX_CHARS) -> str:
    """What the model is told of a call that did not succeed, at most ``max_chars`` characters."""
    said = clean(reason).rstrip(".。")
    return cut(f"{said}. Next step: {clean(next_step)}" if next_step else f"{said}.", max_chars)


def registered(head: EvidenceHead, *, now_ms: int) -> EvidenceHead:
    """The head as a call begins."""
    return msgspec.structs.replace(head, status=CallStatus.STARTED, started_at=now_ms)


def settled_success(
    head: EvidenceHead,
    verdict: ResultVerdict,
    *,
    tool: ToolContract,
    result_json: str,
    now_ms: int,
    duration_ms: int,
    entities_json: str = "",
    reason: str = "",
    next_step: str = "",
    brief_max_chars: int = BRIEF_MAX_CHARS,
    detail_max_chars: int = DETAIL_MAX_CHARS,
) -> EvidenceHead:
    """The head of a call that returned. ``reason`` and ``next_step``: for a business failure."""
    explained = detail(reason or verdict.problem or "the tool reports a failure", next_step, detail_max_chars)
    return msgspec.structs.replace(
        head,
        status=CallStatus.SUCCESS,
        business_ok=verdict.business_ok,
        empty=verdict.empty,
        extract_counts=dict(verdict.extract_counts),
        failure_kind=verdict.failure_kind,
        result_brief=brief(verdict.value, tool.mask, brief_max_chars) if not verdict.problem else "",
        entities=entities_json,
        payload_bytes=len(result_json.encode()),
        detail="" if verdict.business_ok else explained,
        artifact=tool.artifact and verdict.business_ok,
        finished_at=now_ms,
        duration=duration_ms,
    )


def settled_failure(
    head: EvidenceHead,
    failure: CallFailure,
    *,
    error_code: str,
    reason: str,
    next_step: str,
    now_ms: int,
    duration_ms: int,
    detail_max_chars: int = DETAIL_MAX_CHARS,
) -> EvidenceHead:
    """The head of a call that failed, or whose outcome is not known."""
    return msgspec.structs.replace(
        head,
        status=failure.status,
        business_ok=False if failure.kind is FailureKind.BUSINESS_FAILURE else None,
        failure_kind=failure.kind,
        error_code=error_code,
        detail=detail(reason, next_step, detail_max_chars),
        finished_at=now_ms,
        duration=duration_ms,
    )


# --- a write whose outcome is not known -------------------------------------------------------------


class WriteVerdict(StrEnum):
    """What a check says about a write (D44); only the first two settle it."""

    EFFECTIVE = "EFFECTIVE"
    NOT_EFFECTIVE = "NOT_EFFECTIVE"
    CANNOT_TELL = "CANNOT_TELL"


def believable_from(started_at_ms: int, tool_timeout_s: float, lease_ms: int) -> int:
    """Epoch ms from which "not effective" is believed: a late call may still land before (D35)."""
    return started_at_ms + round(tool_timeout_s * 1000) + lease_ms


def check_arguments(verify: VerifyContract, arguments: Any, idempotency_key: str) -> dict[str, Any]:
    """The check tool's arguments: JMESPaths over ``{args, key}``; what is null is left out."""
    known = {"args": arguments, "key": idempotency_key}
    found = {name: _compiled(path).search(known) for name, path in verify.args.items()}
    return {name: value for name, value in found.items() if value is not None}


def evaluate_check(
    verify: VerifyContract,
    result_json: str,
    *,
    failed: bool,
    asked_at_ms: int,
    believable_from_ms: int,
) -> WriteVerdict:
    """What the check tool's answer says. ``failed``: the check call itself did not succeed.

    A failed check, an unreadable answer and a "not found" asked before ``believable_from_ms`` cannot
    tell.
    """
    if failed:
        return WriteVerdict.CANNOT_TELL
    try:
        found = _holds(verify.found, parse_json(result_json, max_keys=RESULT_MAX_KEYS))
    except (JsonRefused, jmespath.exceptions.JMESPathError):
        return WriteVerdict.CANNOT_TELL
    if found:
        return WriteVerdict.EFFECTIVE
    return WriteVerdict.NOT_EFFECTIVE if asked_at_ms >= believable_from_ms else WriteVerdict.CANNOT_TELL


def settled_by_verdict(
    head: EvidenceHead, verdict: WriteVerdict, *, not_before_ms: int, reason: str, now_ms: int
) -> EvidenceHead:
    """UNKNOWN → SUCCESS or FAILED, by a check or by the user; ValueError for CANNOT_TELL.

    A re-issue after "not effective" is barred until ``not_before_ms``, whoever said it.
    """
    if verdict is WriteVerdict.CANNOT_TELL:
        raise ValueError("a verdict that cannot tell settles nothing")
    if verdict is WriteVerdict.EFFECTIVE:
        return msgspec.structs.replace(
            head,
            status=CallStatus.SUCCESS,
            business_ok=True,
            empty=False,
            failure_kind=FailureKind.NONE,
            result_brief=clean(reason, BRIEF_MAX_CHARS),
            error_code="",
            detail="",
            finished_at=now_ms,
        )
    return msgspec.structs.replace(
        head,
        status=CallStatus.FAILED,
        business_ok=False,
        not_before=not_before_ms,
        detail=detail(reason, "request the write again if it is still wanted"),
        finished_at=now_ms,
    )


# --- JMESPath ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _compiled(expression: str) -> jmespath.parser.ParsedResult:
    return jmespath.compile(expression)


def _holds(expression: str, value: Any) -> bool:
    """JMESPath's own truth: false, null and everything empty do not hold; 0 does."""
    found = _compiled(expression).search(value)
    return not (found is None or found is False or found in ("", [], {}))


def _search_or_none(expression: str, value: Any) -> Any:
    try:
        return _compiled(expression).search(value)
    except jmespath.exceptions.JMESPathError:
        return None


def _count(expression: str, value: Any) -> int:
    found = _search_or_none(expression, value)
    if isinstance(found, list):
        return len(found)
    return 0 if found is None else 1


def _mentions(rules: Mapping[str, EntityRule], value: Any) -> tuple[Mention, ...]:
    mentions: dict[tuple[str, str], Mention] = {}
    for entity_type, rule in rules.items():
        found = _search_or_none(rule.items, value) if rule.items else value
        for item in found if isinstance(found, list) else [found]:
            entity_id = _search_or_none(rule.id, item)
            if not isinstance(entity_id, str | int) or isinstance(entity_id, bool) or entity_id == "":
                continue
            name = _search_or_none(rule.display_name, item) if rule.display_name else None
            attributes = {path: _search_or_none(path, item) for path in rule.attrs}
            mention = Mention(
                type=entity_type,
                id=str(entity_id),
                display_name="" if name is None else str(name),
                attrs={
                    path: scalar
                    for path, scalar in attributes.items()
                    if isinstance(scalar, str | int | float | bool)
                },
            )
            mentions[entity_type, mention.id] = mention
    return tuple(mentions.values())


def _problem(fault: Exception) -> str:
    if isinstance(fault, JsonRefused):
        return f"the result cannot be read: {fault}"
    return "the result does not have the form that the tool's contract expects"
