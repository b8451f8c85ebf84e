"""Deletion, for good (state.md, Deletion): the fence moves in SQL first, so that a running turn ends fenced;
then everything goes, but for a tombstone that refuses whoever comes late. Safe to repeat at any point."""

from __future__ import annotations

from state_service.conversation.stores import Stores
from state_service.core import keys
from state_service.ports import Read, Scope
from turnfence import records as r
from turnfence.errors import Reason, TurnfenceError

TOMBSTONE_MS = 3_600_000  # in Redis; SQL's stays
BATCH_ROWS = 500  # that one transaction erases: short ones let others through


async def delete_conversation(
    stores: Stores, request: r.DeleteConversationRequest
) -> r.DeleteConversationResponse:
    """Erase the conversation. It is not waited for a running turn. Raises NOT_FOUND, STATE_UNAVAILABLE; a
    deletion that was cut short refuses writers already, and goes on by a repeat or by the sweeper."""
    scope = Scope(request.organ_id, request.conversation_id)
    version = await stores.upkeep.bury(scope, request.user_id, stores.clock.now_ms())
    if version is None:
        raise TurnfenceError(Reason.NOT_FOUND)
    await erase(stores, scope, version)
    return r.DeleteConversationResponse()


async def erase(stores: Stores, scope: Scope, version: int) -> None:
    """What is left of a buried conversation."""
    await stores.hot.bury(scope, (), version=version, ttl_ms=TOMBSTONE_MS)
    (listed,) = await stores.hot.read(scope, [Read("SMEMBERS", keys.KEYS)])  # nobody adds to it any more
    doomed = {key for key in keys.CONVERSATION_KEYS if key != keys.STATE} | set(listed)
    since = stores.clock.now_ms() - 2 * stores.rules.expiries.events_ms
    for run_id in await stores.upkeep.recent_runs(scope, since):
        doomed |= {keys.events(run_id), keys.run(run_id)}
    await stores.hot.bury(scope, sorted(doomed), version=version, ttl_ms=TOMBSTONE_MS)
    while await stores.upkeep.erase_some(scope, BATCH_ROWS):
        pass
    await stores.upkeep.erased(scope)
