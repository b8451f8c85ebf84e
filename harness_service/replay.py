"""A message that has a run already: its recorded events instead of a second turn (wire.md)."""

from __future__ import annotations

import asyncio

import msgspec

from harness_service.scope import Deps
from harness_service.turn_types import TurnChannel, TurnRequest
from turnfence import records as r
from turnfence.errors import Reason, TurnfenceError


async def replay(deps: Deps, request: TurnRequest, channel: TurnChannel, existing: r.Run) -> r.Run:
    """Hand over the run's events from the start, whether it has ended or still runs elsewhere, and
    return the run as it ended. The caller going away stops the reading and nothing else."""
    reading = asyncio.create_task(_read(deps, request, channel, existing))
    gone = asyncio.create_task(channel.cancelled())
    try:
        await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        return existing
    finally:
        reading.cancel()
        gone.cancel()
        await asyncio.gather(reading, gone, return_exceptions=True)


async def _read(deps: Deps, request: TurnRequest, channel: TurnChannel, existing: r.Run) -> r.Run:
    watch = r.WatchEventsRequest(
        organ_id=request.principal.organ_id,
        user_id=request.principal.user_id,
        run_id=existing.run_id,
    )
    timeout = request.call_deadline or deps.settings.budget.deadline
    held: r.TurnEvent | None = None
    async for item in deps.state.watch_events(watch, timeout=timeout):
        if isinstance(item, r.Run):
            if held is not None:
                channel.replay([_with_durability(held, item)])
            return item
        if isinstance(item.kind, r.Done):
            held = item  # its durability is known with the ended run
        else:
            channel.replay([item])
    raise TurnfenceError(Reason.STATE_UNAVAILABLE, detail="the run's events ended before the run")


def _with_durability(event: r.TurnEvent, run: r.Run) -> r.TurnEvent:
    """``durability`` is not recorded in the event: whoever serves it fills it in."""
    assert isinstance(event.kind, r.Done)
    return msgspec.structs.replace(event, kind=msgspec.structs.replace(event.kind, durability=run.durability))
