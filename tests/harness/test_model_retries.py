"""How often a model is asked: a failed call once more and never again, each one counted before it is made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from harness_service.adapters.openai_model import OpenAiModel
from harness_service.agent.model_calls import ask, ask_structured
from harness_service.core.budget import BudgetExceeded, RunBudget
from harness_service.core.run import RunLifecycle
from harness_service.ports import Briefing, ChatMessage, ChatRequest, ModelCall, ModelFailed
from harness_service.scope import Deps, TurnScope
from harness_service.settings import ModelSettings, Settings
from harness_service.turn_types import TurnRequest
from tests.model_server import Fault, ModelServer, Reply
from turnfence import records as r
from turnfence.serving.process import SystemClock

MESSAGES = (ChatMessage("user", "how full is it?"),)
REQUEST = ChatRequest(ModelCall.SYSTEM_ANSWER, MESSAGES, Briefing())
DOWN, SLOW, WRONG = Fault(status=503), Fault(hang=True), Fault(status=400)


@asynccontextmanager
async def scope_of(
    replies: dict[str, list[Reply]], **limits: int
) -> AsyncIterator[tuple[TurnScope, ModelServer]]:
    """A turn's scope with a real model client, and nothing else that could be called."""
    async with ModelServer(replies) as server:
        model = OpenAiModel(base_url=server.base_url, api_key="k", name="stand-in")
        nothing: Any = None
        deps = Deps(
            state=nothing,
            model=model,
            guard_model=model,
            tools=nothing,
            knowledge=nothing,
            catalogue=nothing,
            clock=SystemClock(),
            settings=Settings(model=ModelSettings(timeout=0.3)),
        )
        begun = r.BeginTurnResponse(
            turn=r.TurnRef("o", "c", "run", 1, "lease"),
            snapshot=r.Snapshot(r.Conversation("c", "u")),
        )
        budget = RunBudget(
            r.Budget(
                **{
                    "model_calls": 10,
                    "tool_calls": 10,
                    "tokens": 10_000,
                    "payload_bytes": 10,
                    "deadline": 60_000,
                }
                | limits
            )
        )
        request = TurnRequest(r.Principal("o", "u"), "run", "c", "m")
        try:
            yield (
                TurnScope(
                    deps, request, nothing, RunLifecycle(), budget, begun, started_at=0, lease_until=1e12
                ),
                server,
            )
        finally:
            await model.close()


def usage(scope: TurnScope) -> r.Usage:
    return scope.budget.usage(0)


@pytest.mark.parametrize(
    ("replies", "asked", "succeeds"),
    [
        ([DOWN, "full"], 2, True),
        ([SLOW, "full"], 2, True),
        ([Fault(drop=True), "full"], 2, True),
        ([DOWN, DOWN, "full"], 2, False),
        ([DOWN, SLOW, "full"], 2, False),
        ([WRONG, "full"], 1, False),
        ([Fault(html=True), "full"], 1, False),
        ([DOWN, WRONG, "full"], 2, False),
        (["full"], 1, True),
    ],
)
async def test_a_call_that_may_succeed_is_made_once_more_and_never_again(
    replies: list[Reply], asked: int, succeeds: bool
) -> None:
    async with scope_of({"text": replies}) as (scope, server):
        if succeeds:
            assert (await ask(scope, REQUEST)).text == "full"
        else:
            with pytest.raises(ModelFailed):
                await ask(scope, REQUEST)
        assert len(server.requests) == asked
        used = usage(scope)
    assert used.model_calls == asked  # failed ones too
    assert (used.prompt_tokens, used.completion_tokens) == ((10, 5) if succeeds else (0, 0))
    assert used.tokens_estimated is (asked > 1 or not succeeds)


def parsed(text: str) -> str:
    if text != "fits":
        raise ValueError(text)
    return text


@pytest.mark.parametrize(
    ("replies", "asked", "succeeds"),
    [
        (["fits"], 1, True),
        (["misfit", "fits"], 2, True),
        (["misfit", "misfit", "fits"], 2, False),
        (["misfit", WRONG, "fits"], 2, False),
        ([DOWN, "misfit", DOWN, "fits"], 4, True),
        ([DOWN, "misfit", DOWN, DOWN, "fits"], 4, False),
    ],
)
async def test_a_reply_that_does_not_fit_its_schema_is_a_failed_call_retried_once(
    replies: list[Reply], asked: int, succeeds: bool
) -> None:
    """At worst two tries, each with one retry of its own: four requests."""
    async with scope_of({"turn_decision": replies}) as (scope, server):
        call = ask_structured(
            scope, ModelCall.TURN_DECISION, MESSAGES, Briefing(), {"type": "object"}, parsed
        )
        if succeeds:
            assert await call == "fits"
        else:
            with pytest.raises(ModelFailed) as caught:
                await call
            assert "misfit" not in str(caught.value)  # a model's words are no error's text
        assert len(server.requests) == asked
        assert usage(scope).model_calls == asked


async def test_a_retry_that_the_budget_does_not_cover_is_not_made() -> None:
    async with scope_of({"text": [DOWN, "full"]}, model_calls=1) as (scope, server):
        with pytest.raises(BudgetExceeded):
            await ask(scope, REQUEST)
        assert len(server.requests) == 1
