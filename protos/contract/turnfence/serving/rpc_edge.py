"""The outermost server interceptor: what a handler raises becomes a status of the contract.

Without it grpc.aio sends an exception's text to the caller (measured on 1.85). Here ``TurnfenceError``
becomes its status, and everything else a log line with an id and INTERNAL with a constant text and that id.
"""

from __future__ import annotations

import inspect
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from turnfence.errors import Reason, TurnfenceError
from turnfence.rpc_errors import to_grpc_status
from turnfence.serving.logs import get_logger

_log = get_logger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Handler = Callable[[Any, Any], Any]


class ErrorEdge(grpc.aio.ServerInterceptor):
    """Wraps every kind of asynchronous method; synchronous ones (grpc_admin's) pass as they are."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(
            rpc=handler_call_details.method, request_id=_request_id(handler_call_details)
        )
        handler = await continuation(handler_call_details)
        return None if handler is None else _guarded(handler)


def _request_id(details: grpc.HandlerCallDetails) -> str:
    """The caller's ``x-request-id`` when it is one, else a new one."""
    for key, value in details.invocation_metadata or ():
        if key == "x-request-id" and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(8)


def _guarded(handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler with its exceptions mapped. A unary request is decoded inside, so that bytes which
    are no message are INVALID_REQUEST too, not UNKNOWN with the decoder's text."""
    behaviour: Handler = getattr(handler, _KINDS[(handler.request_streaming, handler.response_streaming)])
    decode = None if handler.request_streaming else handler.request_deserializer
    wrapped: Handler
    if inspect.isasyncgenfunction(behaviour):
        wrapped = _guard_stream(behaviour, decode)
    elif inspect.iscoroutinefunction(behaviour):
        wrapped = _guard_call(behaviour, decode)
    else:
        return cast("grpc.RpcMethodHandler[Any, Any]", handler)
    make = _MAKERS[(handler.request_streaming, handler.response_streaming)]
    return make(
        wrapped,
        request_deserializer=None if decode else handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


# (request streams, response streams) → the handler's attribute, and what builds such a handler.
_KINDS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}
_MAKERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _guard_call(behaviour: Handler, decode: Callable[[bytes], Any] | None) -> Handler:
    """For unary answers, and for handlers that stream by ``context.write``."""

    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await behaviour(decode(request) if decode else request, context)
        except Exception as error:
            await _abort(error, context)
            raise

    return guarded


def _guard_stream(behaviour: Handler, decode: Callable[[bytes], Any] | None) -> Handler:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(decode(request) if decode else request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(error, context)
            raise

    return guarded


async def _abort(error: Exception, context: Any) -> None:
    """End the call with the error's status. Returns only for what must go on as it is: an abort that has
    happened already. (A cancellation is no ``Exception`` and never gets here.)"""
    if isinstance(error, grpc.aio.AbortError):
        return
    await context.abort_with_status(to_grpc_status(as_answer(error)))


def as_answer(error: Exception) -> TurnfenceError:
    """What the caller is told, and what is logged: of anything unexpected only an id goes out."""
    if isinstance(error, TurnfenceError):
        log = _log.error if error.reason is Reason.INTERNAL else _log.info
        log("call refused", reason=error.reason.value, code=error.log_code, detail=error.detail)
        return error
    if isinstance(error, DecodeError):
        _log.info("call refused", reason=Reason.INVALID_REQUEST.value, detail="the request is no message")
        return TurnfenceError(Reason.INVALID_REQUEST, message="The request could not be decoded.")
    error_id = secrets.token_hex(8)
    _log.error("call failed", error_id=error_id, exc_info=error)
    return TurnfenceError(Reason.INTERNAL, metadata={"error_id": error_id})
