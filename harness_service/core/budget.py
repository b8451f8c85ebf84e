"""The run's hard budget: reserved before each call, settled after it (D64).

Every provider call counts: retries, routing, guards, repair and delegated nodes too. Settling never
raises, so that a write that has happened is always recorded; what went over is found by the next
reservation or by ``check``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from turnfence.errors import FieldViolation, Reason, TurnfenceError
from turnfence.records import Budget, Usage


class BudgetAxis(StrEnum):
    MODEL_CALLS = "model_calls"
    TOOL_CALLS = "tool_calls"
    TOKENS = "tokens"
    PAYLOAD_BYTES = "payload_bytes"


class BudgetExceeded(Exception):
    """The next call would not fit, or the last one did not; the run is BUDGET_EXHAUSTED."""

    def __init__(self, axis: BudgetAxis) -> None:
        super().__init__(f"budget exhausted: {axis}")
        self.axis = axis


class Reservation(msgspec.Struct, frozen=True):
    """What one call holds until it is settled or released, once."""

    id: int
    amounts: Mapping[BudgetAxis, int]


def merge_budgets(server: Budget, request: Budget | None) -> Budget:
    """The server's limits, lowered where the request asks for less (0 or None: no wish).

    Raises INVALID_REQUEST naming every negative field.
    """
    if request is None:
        return server
    wishes = {name: getattr(request, name) or 0 for name in Budget.__struct_fields__}
    negative = [
        FieldViolation(f"budget.{name}", "must not be negative") for name, wish in wishes.items() if wish < 0
    ]
    if negative:
        raise TurnfenceError(Reason.INVALID_REQUEST, violations=negative)
    return Budget(
        model_calls=_lower(server.model_calls, wishes["model_calls"]),
        tool_calls=_lower(server.tool_calls, wishes["tool_calls"]),
        tokens=_lower(server.tokens, wishes["tokens"]),
        payload_bytes=_lower(server.payload_bytes, wishes["payload_bytes"]),
        deadline=_lower(server.deadline or 0, wishes["deadline"]) or None,
    )


def _lower(limit: int, wish: int) -> int:
    """The smaller of two limits of which 0 is none."""
    return min(limit, wish) if limit and wish else limit or wish


class RunBudget:
    """Usage of one run against its limits. Its methods never wait, so one event loop needs no lock."""

    def __init__(self, limits: Budget) -> None:
        self.limits = limits
        self._limit: Mapping[BudgetAxis, int] = {axis: getattr(limits, axis.value) for axis in BudgetAxis}
        self._used = dict.fromkeys(BudgetAxis, 0)
        self._held: dict[int, Reservation] = {}
        self._next_id = 1
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._tokens_estimated = False
        self._agent_steps = 0

    def reserve_model_call(self, tokens: int = 1) -> Reservation:
        """One model call and the tokens it is expected to take; BudgetExceeded names the axis."""
        return self._reserve({BudgetAxis.MODEL_CALLS: 1, BudgetAxis.TOKENS: max(1, tokens)})

    def settle_model_call(
        self,
        reservation: Reservation,
        prompt_tokens: int,
        completion_tokens: int,
        *,
        estimated: bool = False,
        agent_step: bool = False,
    ) -> None:
        """What the call really took; ``agent_step``: it was a step of a node's loop."""
        self._settle(
            reservation,
            {BudgetAxis.MODEL_CALLS: 1, BudgetAxis.TOKENS: prompt_tokens + completion_tokens},
        )
        self._prompt_tokens += prompt_tokens
        self._completion_tokens += completion_tokens
        self._tokens_estimated |= estimated
        self._agent_steps += agent_step

    def reserve_tool_call(self, payload_bytes: int = 1) -> Reservation:
        """One tool call; its payload's size is not known, so the least it may bring is reserved."""
        return self._reserve({BudgetAxis.TOOL_CALLS: 1, BudgetAxis.PAYLOAD_BYTES: max(1, payload_bytes)})

    def settle_tool_call(self, reservation: Reservation, payload_bytes: int) -> None:
        self._settle(reservation, {BudgetAxis.TOOL_CALLS: 1, BudgetAxis.PAYLOAD_BYTES: payload_bytes})

    def release(self, reservation: Reservation) -> None:
        """The call was never made (refused, reused, cancelled before it): nothing counts."""
        self._settle(reservation, {})

    def check(self) -> None:
        """Raise BudgetExceeded when what was settled is over a limit."""
        for axis in BudgetAxis:
            if self._limit[axis] and self._used[axis] > self._limit[axis]:
                raise BudgetExceeded(axis)

    def usage(self, duration_ms: int | None = None) -> Usage:
        """What was settled so far; a call under way is not in it."""
        return Usage(
            model_calls=self._used[BudgetAxis.MODEL_CALLS],
            tool_calls=self._used[BudgetAxis.TOOL_CALLS],
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            tokens_estimated=self._tokens_estimated,
            payload_bytes=self._used[BudgetAxis.PAYLOAD_BYTES],
            agent_steps=self._agent_steps,
            duration=duration_ms,
        )

    def _reserve(self, amounts: Mapping[BudgetAxis, int]) -> Reservation:
        self.check()
        for axis, amount in amounts.items():
            held = sum(reservation.amounts.get(axis, 0) for reservation in self._held.values())
            if self._limit[axis] and self._used[axis] + held + amount > self._limit[axis]:
                raise BudgetExceeded(axis)
        reservation = Reservation(self._next_id, amounts)
        self._next_id += 1
        self._held[reservation.id] = reservation
        return reservation

    def _settle(self, reservation: Reservation, amounts: Mapping[BudgetAxis, int]) -> None:
        if self._held.pop(reservation.id, None) is None:
            raise ValueError("this reservation was settled already")
        if any(amount < 0 for amount in amounts.values()):
            raise ValueError("a call cannot take less than nothing")
        for axis, amount in amounts.items():
            self._used[axis] += amount
