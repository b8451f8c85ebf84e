"""Calls to the model: counted before they are made, bounded, given up with the run (D64)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from harness_service.ports import (
    Briefing,
    ChatMessage,
    ChatModel,
    ChatReply,
    ChatRequest,
    ModelCall,
    ModelFailed,
)
from harness_service.scope import TurnScope

T = TypeVar("T")

TRIES = 2  # a failed call is retried once, then it is the row's "on failure"
CHARS_PER_TOKEN = 4  # for reserving; what is settled is what the endpoint says


async def ask(
    scope: TurnScope, request: ChatRequest, *, guard: bool = False, step: bool = False
) -> ChatReply:
    """One completion. Raises ``ModelFailed`` after a retryable failure was tried again, ``BudgetExceeded``
    before a call that would not fit, ``RunAborted`` when the run has ended. ``step``: a node's step."""
    for tries_left in reversed(range(TRIES)):
        try:
            return await _once(scope, request, guard=guard, step=step)
        except ModelFailed as error:
            if not error.retryable or not tries_left:
                raise
    raise AssertionError("unreachable: the last try raises")


async def ask_structured(
    scope: TurnScope,
    call: ModelCall,
    messages: tuple[ChatMessage, ...],
    briefing: Briefing,
    schema: dict[str, Any],
    parse: Callable[[str], T],
    *,
    guard: bool = False,
) -> T:
    """A call whose reply must fit ``schema``: one that does not (``parse`` raises ``ValueError``) is a
    failed call, retried once, then ``ModelFailed``."""
    request = ChatRequest(call=call, messages=messages, briefing=briefing, response_schema=schema)
    for tries_left in reversed(range(TRIES)):
        reply = await ask(scope, request, guard=guard)
        try:
            return parse(reply.text)
        except ValueError as fault:
            if not tries_left:
                raise ModelFailed(f"{call.value} does not fit its schema: {type(fault).__name__}") from fault
    raise AssertionError("unreachable: the last try raises")


async def _once(scope: TurnScope, request: ChatRequest, *, guard: bool, step: bool) -> ChatReply:
    scope.check_active()
    settings = scope.deps.settings
    model: ChatModel = scope.deps.guard_model if guard else scope.deps.model
    timeout = (settings.guard_model if guard and settings.guard_model else settings.model).timeout
    reservation = scope.budget.reserve_model_call(_expected_tokens(request))
    settled = False
    try:
        reply = await scope.while_active(model.complete(request, timeout=timeout))
        scope.budget.settle_model_call(
            reservation,
            reply.usage.prompt_tokens,
            reply.usage.completion_tokens,
            estimated=reply.usage.estimated,
            agent_step=step,
        )
        settled = True
    finally:
        if not settled:
            # It was made, and what it took is not known: it counts as a call without tokens.
            scope.budget.settle_model_call(reservation, 0, 0, estimated=True)
    scope.check_active()
    return reply


def _expected_tokens(request: ChatRequest) -> int:
    return sum(len(message.content) for message in request.messages) // CHARS_PER_TOKEN
