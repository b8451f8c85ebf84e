"""What a begin puts right after a turn that did not finish (state document 5.2; D38–D40, D72).

Decided by state, never by a flag: the lock and the fence prove that nobody else is live, so every
STARTED of another run is UNKNOWN, every RUNNING node is READY again. Applying it twice changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from turnfence import records as r
from turnfence.axes import CallStatus, EdgeType, NodeStatus

TERMINAL_NODES = frozenset({NodeStatus.DONE, NodeStatus.SKIPPED, NodeStatus.FAILED, NodeStatus.CANCELLED})


def nodes(graph: Sequence[r.TaskNode], edges: Sequence[r.TaskEdge]) -> list[r.TaskNode]:
    """The nodes that change: RUNNING → READY; WAITING_DELEGATE whose delegates all ended → READY."""
    status = {node.node_id: node.status for node in graph}
    return [
        msgspec.structs.replace(node, status=NodeStatus.READY)
        for node in graph
        if node.status is NodeStatus.RUNNING
        or (node.status is NodeStatus.WAITING_DELEGATE and _delegates_ended(node.node_id, edges, status))
    ]


def _delegates_ended(node_id: str, edges: Sequence[r.TaskEdge], status: dict[str, NodeStatus]) -> bool:
    delegates = [
        edge.from_node_id for edge in edges if edge.type is EdgeType.DELEGATE and edge.to_node_id == node_id
    ]
    return all(status.get(delegate) in TERMINAL_NODES for delegate in delegates)


def head(evidence: r.EvidenceHead, run_id: str) -> r.EvidenceHead | None:
    """A write that another run left open: STARTED → UNKNOWN, UNKNOWN_PRE_CALL → CANCELLED (D38: the
    harness knew that no call was made). None: nothing to change."""
    if evidence.trace_id == run_id:
        return None
    if evidence.status is CallStatus.STARTED:
        return msgspec.structs.replace(evidence, status=CallStatus.UNKNOWN)
    if evidence.status is CallStatus.UNKNOWN_PRE_CALL:
        return msgspec.structs.replace(evidence, status=CallStatus.CANCELLED)
    return None


def settled_wins(hot: r.EvidenceHead | None, cold: r.EvidenceHead) -> bool:
    """Whether SQL's state of a call must be merged into the hot set: it is missing there, or is
    settled in SQL and open in Redis (state.md: the settled state wins, whichever side has it)."""
    open_states = (CallStatus.STARTED, CallStatus.UNKNOWN, CallStatus.UNKNOWN_PRE_CALL)
    return hot is None or (hot.status in open_states and cold.status not in open_states)
