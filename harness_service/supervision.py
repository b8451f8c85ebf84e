"""What runs beside a turn: heartbeat, deadline, and the one door for cancels. All of them end the run
through its lifecycle, where the first one wins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness_service.scope import TurnScope
from turnfence import records as r
from turnfence.axes import CancelReason
from turnfence.errors import Reason, TurnfenceError
from turnfence.serving.logs import get_logger

_log = get_logger(__name__)


@asynccontextmanager
async def supervised(scope: TurnScope) -> AsyncIterator[None]:
    """Keep the lease, watch the deadline and listen for a cancel while the body runs."""
    tasks = [
        asyncio.create_task(_keep_lease(scope), name=f"heartbeat {scope.request.run_id}"),
        asyncio.create_task(_watch_deadline(scope), name=f"deadline {scope.request.run_id}"),
        asyncio.create_task(_listen(scope), name=f"cancel {scope.request.run_id}"),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(scope: TurnScope) -> None:
    scope.lifecycle.cancel(await scope.channel.cancelled())


async def _watch_deadline(scope: TurnScope) -> None:
    remaining = scope.lifecycle.remaining(scope.deps.clock.monotonic())
    if remaining is None:
        return
    await asyncio.sleep(remaining)
    scope.lifecycle.cancel(CancelReason.DEADLINE_EXCEEDED)


async def _keep_lease(scope: TurnScope) -> None:
    """Extend the lease every heartbeat. Its own end counts from before the call was sent, so that the
    holder always stops before anybody else may start (D7)."""
    settings = scope.deps.settings.state
    clock = scope.deps.clock
    while True:
        await asyncio.sleep(settings.heartbeat)
        sent = clock.monotonic()
        try:
            answer = await scope.deps.state.renew_lease(
                r.RenewLeaseRequest(turn=scope.turn), timeout=min(settings.heartbeat, settings.call_timeout)
            )
        except TurnfenceError as error:
            if error.reason is Reason.STATE_FENCED:
                scope.lifecycle.cancel(CancelReason.FENCED)
                return
            _log.warning("lease not renewed", reason=error.reason.value, detail=error.detail)
            if clock.monotonic() >= scope.lease_until:
                scope.lifecycle.cancel(CancelReason.STATE_UNAVAILABLE)
                return
            continue
        scope.lease_until = sent + settings.lease
        if answer.cancel is not None:
            scope.lifecycle.cancel(answer.cancel)
