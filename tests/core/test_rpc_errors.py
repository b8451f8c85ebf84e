"""A status that no service of ours made, as the caller takes it."""

from __future__ import annotations

import grpc
import pytest

from turnfence.errors import Reason, TurnfenceError
from turnfence.rpc_errors import from_rpc_error, to_grpc_status

# Whether a call that broke has arrived is unknown: to repeat it under its identity is safe, to end is not.
FOREIGN = {
    grpc.StatusCode.UNAVAILABLE: Reason.STATE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.STATE_UNAVAILABLE,
    grpc.StatusCode.CANCELLED: Reason.STATE_UNAVAILABLE,
    grpc.StatusCode.INTERNAL: Reason.STATE_UNAVAILABLE,  # "Internal error from Core": it broke
    grpc.StatusCode.UNKNOWN: Reason.INTERNAL,
    grpc.StatusCode.UNIMPLEMENTED: Reason.NOT_SERVED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.STATE_WRITE_FAILED,
}


def failed(code: grpc.StatusCode, trailing: grpc.aio.Metadata | None = None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing or grpc.aio.Metadata(), details="said so")


@pytest.mark.parametrize("code", FOREIGN, ids=lambda code: code.name)
def test_a_foreign_status(code: grpc.StatusCode) -> None:
    assert from_rpc_error(failed(code)).reason is FOREIGN[code]


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_our_own_status_comes_back_as_it_was(reason: Reason) -> None:
    status = to_grpc_status(TurnfenceError(reason, detail="for the log alone"))
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    error = grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)
    assert from_rpc_error(error).reason is reason
