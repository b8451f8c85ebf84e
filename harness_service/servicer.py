"""HarnessService on the wire: translate in, call, translate out. Nothing is decided here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

from harness_service import wire
from harness_service.core.catalogue import Catalogue
from harness_service.live_runs import LiveRun, LiveRuns
from harness_service.ports import OfferedTool, StateStore, ToolProvider
from turnfence.axes import CancelReason, RunState
from turnfence.errors import Reason, TurnfenceError
from turnfence.harness.v1 import harness_pb2 as pb
from turnfence.harness.v1.harness_pb2_grpc import HarnessServiceServicer


class HarnessServicer(HarnessServiceServicer):
    """Spans in seconds: ``reader_stall``, after which a reader that takes nothing is gone, and ``timeout``,
    of what a single answer may take."""

    def __init__(
        self,
        runs: LiveRuns,
        state: StateStore,
        catalogue: Catalogue,
        tools: ToolProvider,
        *,
        reader_stall: float,
        timeout: float,
    ) -> None:
        self._runs = runs
        self._state = state
        self._catalogue = catalogue
        self._tools = tools
        self._reader_stall = reader_stall
        self._timeout = timeout

    async def RunTurn(self, request: pb.RunTurnRequest, context: Any) -> AsyncIterator[pb.RunTurnResponse]:
        left: float | None = context.time_remaining()
        admission = wire.admit(request, agents=self._catalogue.agents, call_deadline=left)
        run = self._runs.start(admission.turn, names_conversation=admission.names_conversation)
        _hold_while_called(run, context, left)
        async for events in run.follow():
            response = wire.events_response(events)
            # While the reader's flow control is shut this generator stays suspended at its yield.
            stall = asyncio.get_running_loop().call_later(
                self._reader_stall, run.cancel, CancelReason.CLIENT_DISCONNECTED
            )
            try:
                yield response
            finally:
                stall.cancel()
        outcome = await run.outcome()
        if outcome.run_state is RunState.CANCELLED:
            raise TurnfenceError(Reason.CANCELLED, metadata=_cancel_metadata(outcome))

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        named = wire.run_named(request)
        return wire.run_response(await self._state.get_run(named, timeout=self._time_for(context)))

    async def ListAgents(self, request: pb.ListAgentsRequest, context: Any) -> pb.ListAgentsResponse:
        return wire.agents_response(self._catalogue, await self._reachable(self._time_for(context)), request)

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:
        yield _not_served("WatchRun")

    async def CancelRun(self, request: pb.CancelRunRequest, context: Any) -> pb.CancelRunResponse:
        _not_served("CancelRun")

    async def ExplainRun(self, request: pb.ExplainRunRequest, context: Any) -> pb.ExplainRunResponse:
        _not_served("ExplainRun")

    async def _reachable(self, timeout: float) -> Mapping[str, OfferedTool]:
        """The tools that answer in time; a server that is slow to start is not there yet."""
        try:
            async with asyncio.timeout(timeout):
                return await self._tools.schemas()
        except TimeoutError:
            return {}

    def _time_for(self, context: Any) -> float:
        left: float | None = context.time_remaining()
        return self._timeout if left is None else min(left, self._timeout)


def _hold_while_called(run: LiveRun, context: Any, left: float | None) -> None:
    """Let go of the run when the call is over, however it ends.

    Not in a ``finally`` of the generator: when its caller vanishes while it is suspended at a ``yield``,
    that runs later, in a task nobody awaits. The call's own end is the one place that is always passed.
    """
    hold = run.hold()
    ends_at = None if left is None else time.monotonic() + left

    def over(_context: Any) -> None:
        late = ends_at is not None and time.monotonic() >= ends_at
        hold.release(CancelReason.DEADLINE_EXCEEDED if late else CancelReason.CLIENT_DISCONNECTED)

    context.add_done_callback(over)


def _cancel_metadata(outcome: Any) -> dict[str, str]:
    reason = outcome.termination_reason
    return {"run_id": outcome.run_id, "termination_reason": reason.value if reason else ""}


def _not_served(method: str) -> NoReturn:
    raise TurnfenceError(
        Reason.NOT_SERVED, message=f"{method} is not served by this version.", metadata={"method": method}
    )
