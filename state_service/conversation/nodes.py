"""OpenNode and ReadPayload: Redis first, SQL for what is missing."""

from __future__ import annotations

import msgspec

from state_service.conversation.stores import Stores, check_fence, scope_of
from state_service.core import hot, keys
from state_service.core.spill import placeholder_of
from state_service.ports import Read
from turnfence import records as r
from turnfence.errors import Reason, TurnfenceError


async def open_node(stores: Stores, request: r.OpenNodeRequest) -> r.OpenNodeResponse:
    """A node's space, its evidence heads, and its dialogue oldest first. A node that was never
    opened has an empty space. Raises STATE_FENCED when a newer turn has begun."""
    scope = scope_of(request.turn)
    task_id, node_id = request.task_id, request.node_id
    state, fields, actions, heads, dialogue = await stores.hot.read(
        scope,
        [
            Read("HGETALL", keys.STATE),
            *hot.space_reads(task_id, node_id),
            Read("HGETALL", keys.evidence(task_id, node_id)),
            Read("LRANGE", keys.DIALOGUE, (0, stores.rules.limits.dialogue_max - 1)),
        ],
    )
    check_fence(state, request.turn)
    space = await _resolve_spills(stores, request, hot.node_space(fields, actions))
    evidence = [hot.decode(text, r.EvidenceHead) for text in heads.values()]
    window = [hot.decode(text, r.DialogueMessage) for text in reversed(dialogue)]
    messages = [m for m in window if m.task_id == task_id and m.node_id == node_id]
    if len(window) >= stores.rules.limits.dialogue_max:
        known = {m.message_id for m in messages}
        older = await stores.cold.node_dialogue(scope, task_id, node_id)
        messages = [m for m in older if m.message_id not in known] + messages
    return r.OpenNodeResponse(
        space=space,
        evidence=sorted(evidence, key=lambda head: (head.round, head.started_at or 0, head.evidence_id)),
        dialogue=messages,
    )


async def _resolve_spills(stores: Stores, request: r.OpenNodeRequest, space: r.NodeSpace) -> r.NodeSpace:
    async def value(text: str) -> str:
        payload_id = placeholder_of(text)
        if payload_id is None:
            return text
        data = await stores.cold.payload(scope_of(request.turn), payload_id)
        if data is None:
            raise TurnfenceError(Reason.STATE_LOST, detail="a spilled field has no payload")
        return data

    async def sourced(values: dict[str, r.Sourced]) -> dict[str, r.Sourced]:
        return {
            name: msgspec.structs.replace(v, value_json=await value(v.value_json))
            for name, v in values.items()
        }

    return msgspec.structs.replace(
        space,
        inputs=await sourced(space.inputs),
        outputs=await sourced(space.outputs),
        state={name: await value(text) for name, text in space.state.items()},
    )


async def read_payload(stores: Stores, request: r.ReadPayloadRequest) -> bytes:
    """The tool's payload as UTF-8 JSON. Redis, then ``response``, then ``task_node_payload``
    (state document 5.10). Raises NOT_FOUND, STATE_FENCED."""
    scope = scope_of(request.turn)
    state, text = await stores.hot.read(
        scope,
        [
            Read("HGETALL", keys.STATE),
            Read("GET", keys.payload(request.task_id, request.evidence_id)),
        ],
    )
    check_fence(state, request.turn)
    if text is None:
        text = await stores.cold.call_payload(scope, request.task_id, request.evidence_id)
    if text is None:
        raise TurnfenceError(Reason.NOT_FOUND)
    return str(text).encode()
