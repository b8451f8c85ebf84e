"""The story of one turn, top to bottom: begin → guard → decide → task → release → persist → show.

Whoever edits this file keeps the order of the end: the release is decided, then the run's terminal
state is set (first wins), then everything is persisted, and only then is content shown (D65). The
loser of that race shows nothing of its own.
"""

from __future__ import annotations

import asyncio

from harness_service import ending, pipelines
from harness_service.core.budget import BudgetExceeded, RunBudget, merge_budgets
from harness_service.core.input_hash import input_hash
from harness_service.core.run import RunAborted, RunLifecycle, effective_deadline
from harness_service.ending import TurnEnd
from harness_service.ports import ModelFailed
from harness_service.replay import replay
from harness_service.scope import Deps, TurnScope
from harness_service.settings import Settings
from harness_service.supervision import supervised
from harness_service.turn_types import TurnChannel, TurnRequest
from turnfence import records as r
from turnfence.axes import (
    CancelReason,
    ReleaseOutcome,
    RunState,
    StopReason,
    StreamState,
    TerminationReason,
    TraceEventStatus,
    TraceEventType,
    TracePhase,
    TurnStatus,
)
from turnfence.errors import Reason, TurnfenceError
from turnfence.serving.logs import get_logger

_log = get_logger(__name__)


class TurnStory:
    """``Turn`` of the running service."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def __call__(self, request: TurnRequest, channel: TurnChannel) -> r.Run:
        settings = self._deps.settings
        clock = self._deps.clock
        limits = merge_budgets(server_limits(settings), request.budget)
        seconds = effective_deadline(
            request.call_deadline,
            request.budget.deadline / 1000 if request.budget.deadline else None,
            settings.budget.deadline,
        )
        lifecycle = RunLifecycle(deadline=clock.monotonic() + seconds)
        sent = clock.monotonic()
        begun = await self._begin(request, seconds)
        if begun.existing_run is not None:
            return await replay(self._deps, request, channel, begun.existing_run)
        scope = TurnScope(
            self._deps,
            request,
            channel,
            lifecycle,
            RunBudget(limits),
            begun,
            started_at=clock.now_ms(),
            lease_until=sent + settings.state.lease,
        )
        async with supervised(scope):
            scope.trace(TraceEventType.RUN_STARTED, TracePhase.RUN, TraceEventStatus.STARTED)
            scope.emit(
                r.Metadata(
                    run_id=request.run_id,
                    conversation_id=scope.turn.conversation_id,
                    message_id=request.message_id,
                    agent_id=request.agent_id,
                    truncated=begun.truncated,
                )
            )
            end = await self._play(scope)
            return await ending.finish(scope, end)

    async def _begin(self, request: TurnRequest, seconds: float) -> r.BeginTurnResponse:
        """BeginTurn within the deadline. When its answer is lost, the turn that may have begun is given
        up, best effort: otherwise the conversation stays busy until the lease ends (D8)."""
        state = self._deps.settings.state
        message = r.BeginTurnRequest(
            organ_id=request.principal.organ_id,
            user_id=request.principal.user_id,
            conversation_id=request.conversation_id,
            run_id=request.run_id,
            agent_id=request.agent_id,
            input=r.TurnInput(
                message_id=request.message_id,
                text=request.text,
                action=request.action,
                checkpoint_id=request.checkpoint_id,
            ),
            input_hash=input_hash(request.text, request.action, request.checkpoint_id),
            lease=round(state.lease * 1000),
        )
        if seconds <= 0:
            raise TurnfenceError(Reason.DEADLINE_EXCEEDED)
        try:
            return await self._deps.state.begin_turn(message, timeout=min(seconds, state.call_timeout))
        except TurnfenceError as error:
            if error.reason in (Reason.STATE_UNAVAILABLE, Reason.STATE_WRITE_FAILED, Reason.INTERNAL):
                await self._give_up(request)
            raise
        except asyncio.CancelledError:
            await self._give_up(request)
            raise

    async def _give_up(self, request: TurnRequest) -> None:
        outcome = r.Run(
            run_id=request.run_id,
            conversation_id=request.conversation_id,
            message_id=request.message_id,
            agent_id=request.agent_id,
            run_state=RunState.FAILED,
            termination_reason=TerminationReason.STATE_UNAVAILABLE,
            release_outcome=ReleaseOutcome.FAILED,
            turn_status=TurnStatus.FAILED,
            stream_state=StreamState.NEW,
            finished_at=self._deps.clock.now_ms(),
        )
        abandon = r.AbandonTurnRequest(
            organ_id=request.principal.organ_id,
            conversation_id=request.conversation_id,
            run_id=request.run_id,
            outcome=outcome,
        )
        try:
            await self._deps.state.abandon_turn(abandon, timeout=1.0)
        except TurnfenceError as error:
            _log.warning("begun turn not given up", run_id=request.run_id, reason=error.reason.value)

    async def _play(self, scope: TurnScope) -> TurnEnd:
        """Run the pipeline; whatever goes wrong becomes the run's terminal state and a failed end."""
        try:
            return await pipelines.run(scope)
        except RunAborted:
            _log.info("run ended early")
        except BudgetExceeded:
            scope.lifecycle.cancel(CancelReason.BUDGET_EXHAUSTED)
            scope.axes.stop_reason = StopReason.BUDGET_LIMIT_REACHED
        except ModelFailed as error:
            _log.warning("model failed", detail=str(error))
            scope.lifecycle.fail(TerminationReason.MODEL_FAILED)
        except TurnfenceError as error:
            self._fail_by(scope, error)
        except asyncio.CancelledError:
            scope.lifecycle.cancel(CancelReason.SHUTDOWN)
        except Exception:  # noqa: BLE001  whatever breaks, the turn is closed with a recorded end
            _log.exception("turn broke")
            scope.lifecycle.fail(TerminationReason.INTERNAL_FAILURE)
        return TurnEnd(task_touched=scope.touched, node_id=scope.focus_node)

    @staticmethod
    def _fail_by(scope: TurnScope, error: TurnfenceError) -> None:
        """What the state service answered, as the run's end."""
        _log.warning("turn ended by the state service", reason=error.reason.value, detail=error.detail)
        scope.axes.error_code = error.log_code
        if error.reason is Reason.STATE_FENCED:
            scope.lifecycle.cancel(CancelReason.FENCED)
        elif error.reason in (Reason.STATE_LOST, Reason.STATE_UNAVAILABLE):
            scope.lifecycle.cancel(CancelReason.STATE_UNAVAILABLE)
        else:
            scope.lifecycle.fail(TerminationReason.INTERNAL_FAILURE)


def server_limits(settings: Settings) -> r.Budget:
    budget = settings.budget
    return r.Budget(
        model_calls=budget.model_calls,
        tool_calls=budget.tool_calls,
        tokens=budget.tokens,
        payload_bytes=budget.payload_bytes,
        deadline=round(budget.deadline * 1000),
    )


def build_turn(deps: Deps) -> TurnStory:
    return TurnStory(deps)
