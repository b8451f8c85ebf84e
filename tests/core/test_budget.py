"""D64: every call is reserved before it, settled after it."""

from typing import Any

import pytest

from harness_service.core.budget import BudgetAxis, BudgetExceeded, RunBudget, merge_budgets
from turnfence.errors import Reason, TurnfenceError
from turnfence.records import Budget, Usage


def test_a_request_may_only_lower() -> None:
    server = Budget(model_calls=10, tool_calls=0, tokens=1000, payload_bytes=5, deadline=60_000)
    wish = Budget(model_calls=20, tool_calls=7, tokens=10, payload_bytes=0, deadline=90_000)
    assert merge_budgets(server, wish) == Budget(10, 7, 10, 5, 60_000)
    assert merge_budgets(server, None) == server
    assert merge_budgets(Budget(), Budget(deadline=5)).deadline == 5
    assert merge_budgets(Budget(), Budget()) == Budget()


def test_negative_limits_are_named() -> None:
    with pytest.raises(TurnfenceError) as error:
        merge_budgets(Budget(), Budget(model_calls=-1, tokens=5, deadline=-7))
    assert error.value.reason is Reason.INVALID_REQUEST
    assert [violation.field for violation in error.value.violations] == [
        "budget.model_calls",
        "budget.deadline",
    ]


@pytest.mark.parametrize(
    ("limits", "axis"),
    [
        (Budget(model_calls=1), BudgetAxis.MODEL_CALLS),
        (Budget(tokens=10), BudgetAxis.TOKENS),
    ],
)
def test_model_calls_are_refused_before_they_happen(limits: Any, axis: Any) -> None:
    budget = RunBudget(limits)
    held = budget.reserve_model_call(tokens=10)
    with pytest.raises(BudgetExceeded) as exceeded:
        budget.reserve_model_call(tokens=1)
    assert exceeded.value.axis is axis
    budget.settle_model_call(held, 6, 4)
    with pytest.raises(BudgetExceeded):
        budget.reserve_model_call(tokens=1)


@pytest.mark.parametrize(
    ("limits", "axis"),
    [
        (Budget(tool_calls=1), BudgetAxis.TOOL_CALLS),
        (Budget(payload_bytes=100), BudgetAxis.PAYLOAD_BYTES),
    ],
)
def test_tool_calls_are_refused_before_they_happen(limits: Any, axis: Any) -> None:
    budget = RunBudget(limits)
    budget.settle_tool_call(budget.reserve_tool_call(), payload_bytes=100)
    with pytest.raises(BudgetExceeded) as exceeded:
        budget.reserve_tool_call()
    assert exceeded.value.axis is axis


def test_settling_never_raises_and_the_excess_is_found_next() -> None:
    budget = RunBudget(Budget(payload_bytes=100))
    budget.settle_tool_call(budget.reserve_tool_call(), payload_bytes=500)
    assert budget.usage().payload_bytes == 500
    with pytest.raises(BudgetExceeded) as exceeded:
        budget.check()
    assert exceeded.value.axis is BudgetAxis.PAYLOAD_BYTES


def test_what_was_reserved_and_never_called_counts_nothing() -> None:
    budget = RunBudget(Budget(tool_calls=1))
    budget.release(budget.reserve_tool_call())
    assert budget.usage() == Usage()
    budget.reserve_tool_call()


def test_a_reservation_is_settled_once() -> None:
    budget = RunBudget(Budget())
    held = budget.reserve_model_call()
    budget.settle_model_call(held, 1, 1)
    with pytest.raises(ValueError, match="settled already"):
        budget.settle_model_call(held, 1, 1)
    with pytest.raises(ValueError, match="less than nothing"):
        budget.settle_tool_call(budget.reserve_tool_call(), payload_bytes=-1)


def test_usage() -> None:
    budget = RunBudget(Budget())
    budget.settle_model_call(budget.reserve_model_call(), 5, 2, agent_step=True)
    budget.settle_model_call(budget.reserve_model_call(), 3, 1, estimated=True)
    budget.settle_tool_call(budget.reserve_tool_call(), payload_bytes=9)
    budget.reserve_tool_call()
    assert budget.usage(1234) == Usage(2, 1, 8, 3, True, 9, 1, 1234)
