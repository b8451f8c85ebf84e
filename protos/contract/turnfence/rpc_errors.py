"""``TurnfenceError`` ↔ gRPC status: the one place where errors become statuses, for both ends."""

from __future__ import annotations

import math

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from turnfence.errors import DOMAIN, FieldViolation, Reason, TurnfenceError

_MAX_VIOLATIONS = 20  # error details above about 8 kB replace the real code by RESOURCE_EXHAUSTED


def to_status(error: TurnfenceError) -> status_pb2.Status:
    """The ``google.rpc.Status`` of an error: ErrorInfo always, RetryInfo and BadRequest where due."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=error.metadata)
    ]
    if error.retry_after is not None:
        seconds = math.floor(error.retry_after)
        nanos = int((error.retry_after - seconds) * 1e9)
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos)))
    if error.violations:
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
                    for v in error.violations[:_MAX_VIOLATIONS]
                ]
            )
        )
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.status),
        message=error.message,
        details=[_packed(detail) for detail in details],
    )


def to_grpc_status(error: TurnfenceError) -> grpc.Status:
    """What ``context.abort_with_status`` takes."""
    return rpc_status.to_status(to_status(error))


def from_status(status: status_pb2.Status) -> TurnfenceError | None:
    """The error a status was made from; None when it was not made by this contract."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        for known in (info, retry, bad):
            detail.Unpack(known)
    if info.domain != DOMAIN or info.reason not in Reason.__members__:
        return None
    return TurnfenceError(
        Reason[info.reason],
        message=status.message,
        metadata=dict(info.metadata),
        violations=[FieldViolation(v.field, v.description) for v in bad.field_violations],
        status=code_pb2.Code.Name(status.code),
        retry_after=retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9 if retry.ByteSize() else None,
    )


def from_rpc_error(error: grpc.aio.AioRpcError) -> TurnfenceError:
    """The state service's answer as the error it raised; a broken connection is STATE_UNAVAILABLE. So is an
    INTERNAL that is not ours: gRPC says so of a call that broke while it was being sent, and whether it
    arrived is unknown."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    known = from_status(status) if status is not None else None
    if known is not None:
        return known
    detail = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.UNKNOWN:
        return TurnfenceError(Reason.INTERNAL, detail=detail)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return TurnfenceError(Reason.NOT_SERVED, detail=detail)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return TurnfenceError(Reason.STATE_WRITE_FAILED, status="RESOURCE_EXHAUSTED", detail=detail)
    return TurnfenceError(Reason.STATE_UNAVAILABLE, detail=detail)


def _packed(message: Message) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
