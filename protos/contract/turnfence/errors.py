"""The error vocabulary of the contract: one table that both ends use (design: wire.md, Errors).

An error raised in the state service arrives in the harness as itself: ``turnfence.rpc_errors`` turns
it into a ``google.rpc.Status`` at one end and back at the other, by this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

DOMAIN = "turnfence"


class Reason(StrEnum):
    """``ErrorInfo.reason``; every status that the services make themselves carries one."""

    CONVERSATION_FORBIDDEN = "CONVERSATION_FORBIDDEN"
    CONVERSATION_BUSY = "CONVERSATION_BUSY"
    STATE_FENCED = "STATE_FENCED"
    APPROVAL_EXPIRED = "APPROVAL_EXPIRED"
    ARGS_HASH_MISMATCH = "ARGS_HASH_MISMATCH"
    WRITE_PENDING_VERIFY = "WRITE_PENDING_VERIFY"
    WRITE_IN_FLIGHT = "WRITE_IN_FLIGHT"
    DELEGATE_FORBIDDEN = "DELEGATE_FORBIDDEN"
    DELEGATE_BROKEN = "DELEGATE_BROKEN"
    DELEGATE_REPEATED = "DELEGATE_REPEATED"
    STATE_WRITE_FAILED = "STATE_WRITE_FAILED"
    STATE_UNAVAILABLE = "STATE_UNAVAILABLE"
    STATE_LOST = "STATE_LOST"
    MESSAGE_ID_REUSED = "MESSAGE_ID_REUSED"
    CONVERSATION_DELETED = "CONVERSATION_DELETED"
    INVALID_REQUEST = "INVALID_REQUEST"
    NOT_FOUND = "NOT_FOUND"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    OVERLOADED = "OVERLOADED"
    NOT_SERVED = "NOT_SERVED"
    CANCELLED = "CANCELLED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    INTERNAL = "INTERNAL"


class ErrorRule(msgspec.Struct, frozen=True):
    """How one reason travels: the code in logs, the gRPC status, and what a caller is told."""

    log_code: str
    status: str  # name of a grpc.StatusCode
    message: str
    retry_after: float | None = None  # seconds for RetryInfo; None: do not retry


ERRORS: Mapping[Reason, ErrorRule] = {
    Reason.CONVERSATION_FORBIDDEN: ErrorRule(
        "agent_runtime.40310", "PERMISSION_DENIED", "This conversation belongs to somebody else."
    ),
    Reason.CONVERSATION_BUSY: ErrorRule(
        "agent_runtime.40910", "ABORTED", "Another turn of this conversation is running.", 1.0
    ),
    Reason.STATE_FENCED: ErrorRule(
        "agent_runtime.40911", "ABORTED", "A newer turn has begun; this turn is over."
    ),
    Reason.APPROVAL_EXPIRED: ErrorRule(
        "agent_runtime.40912", "FAILED_PRECONDITION", "The approval has expired."
    ),
    Reason.ARGS_HASH_MISMATCH: ErrorRule(
        "agent_runtime.40913", "FAILED_PRECONDITION", "The arguments are not those that were approved."
    ),
    Reason.WRITE_PENDING_VERIFY: ErrorRule(
        "agent_runtime.40030", "FAILED_PRECONDITION", "The outcome of this write must be verified first."
    ),
    Reason.WRITE_IN_FLIGHT: ErrorRule(
        "agent_runtime.40031", "FAILED_PRECONDITION", "This write is under way."
    ),
    Reason.DELEGATE_FORBIDDEN: ErrorRule(
        "agent_runtime.42237", "FAILED_PRECONDITION", "This delegation is not allowed."
    ),
    Reason.DELEGATE_BROKEN: ErrorRule(
        "agent_runtime.42238", "FAILED_PRECONDITION", "The delegation of this node is broken."
    ),
    Reason.DELEGATE_REPEATED: ErrorRule(
        "agent_runtime.42239", "FAILED_PRECONDITION", "The same delegation has failed already."
    ),
    Reason.STATE_WRITE_FAILED: ErrorRule(
        "agent_runtime.50010", "INTERNAL", "The state could not be written."
    ),
    Reason.STATE_UNAVAILABLE: ErrorRule(
        "agent_runtime.50011", "UNAVAILABLE", "The state service or one of its stores is unavailable.", 1.0
    ),
    Reason.STATE_LOST: ErrorRule(
        "agent_runtime.50012", "DATA_LOSS", "The hot store lost this turn's data; this turn is over."
    ),
    Reason.MESSAGE_ID_REUSED: ErrorRule(
        "agent_runtime.40920", "ALREADY_EXISTS", "This message id was used for another message."
    ),
    Reason.CONVERSATION_DELETED: ErrorRule(
        "agent_runtime.41000", "NOT_FOUND", "This conversation was deleted."
    ),
    Reason.INVALID_REQUEST: ErrorRule("agent_runtime.40000", "INVALID_ARGUMENT", "The request is not valid."),
    Reason.NOT_FOUND: ErrorRule("agent_runtime.40400", "NOT_FOUND", "There is no such thing here."),
    Reason.UNAUTHENTICATED: ErrorRule(
        "agent_runtime.40100", "UNAUTHENTICATED", "The caller could not be identified."
    ),
    Reason.OVERLOADED: ErrorRule(
        "agent_runtime.42900", "RESOURCE_EXHAUSTED", "Too many turns are running; try again later.", 2.0
    ),
    Reason.NOT_SERVED: ErrorRule(
        "agent_runtime.50100", "UNIMPLEMENTED", "This is not served by this version."
    ),
    Reason.CANCELLED: ErrorRule("agent_runtime.49900", "CANCELLED", "The run was cancelled."),
    Reason.DEADLINE_EXCEEDED: ErrorRule(
        "agent_runtime.50400", "DEADLINE_EXCEEDED", "The call's deadline passed."
    ),
    Reason.INTERNAL: ErrorRule("agent_runtime.50000", "INTERNAL", "An internal error occurred."),
}


class FieldViolation(msgspec.Struct, frozen=True):
    """One bad field of a request: its dotted path, and what is wrong with it."""

    field: str
    description: str


class TurnfenceError(Exception):
    """An answer of the contract. ``metadata`` and ``violations`` reach the caller: no user text,
    arguments, SQL, keys or foreign ids in them. ``detail`` is for the log alone."""

    def __init__(
        self,
        reason: Reason,
        *,
        message: str = "",
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[FieldViolation] = (),
        status: str = "",
        retry_after: float | None = None,
        detail: str = "",
    ) -> None:
        rule = ERRORS[reason]
        self.reason = reason
        self.message = message or rule.message
        self.metadata = dict(metadata or {})
        self.violations = tuple(violations)
        self.status = status or rule.status
        self.retry_after = rule.retry_after if retry_after is None else retry_after
        self.detail = detail
        super().__init__(f"{reason}: {self.message}" + (f" [{detail}]" if detail else ""))

    @property
    def log_code(self) -> str:
        return ERRORS[self.reason].log_code


def too_large(what: str, size: int, limit: int) -> TurnfenceError:
    """STATE_WRITE_FAILED for a size limit: RESOURCE_EXHAUSTED, metadata names the limit."""
    return TurnfenceError(
        Reason.STATE_WRITE_FAILED,
        status="RESOURCE_EXHAUSTED",
        message=f"{what} is larger than its limit.",
        metadata={"limit": what, "size": str(size), "max": str(limit)},
    )


def invalid(field: str, description: str) -> TurnfenceError:
    """INVALID_REQUEST naming one bad field."""
    return TurnfenceError(Reason.INVALID_REQUEST, violations=[FieldViolation(field, description)])
