"""GoalGate: a conclusion counts only when the node's target write was done (harness design, A node)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from turnfence.axes import CallStatus, SideEffect
from turnfence.records import EvidenceHead, TaskNode

#: A write in one of these may have happened: the node cannot finish before it is known.
OPEN_WRITE = frozenset({CallStatus.STARTED, CallStatus.UNKNOWN})


class Target(msgspec.Struct, frozen=True):
    """``claimed``: nobody planned it, the first write that was called became it."""

    tool: str = ""
    claimed: bool = False


class GateVerdict(msgspec.Struct, frozen=True):
    """``accepted`` False: the finish is refused with ``reason`` and ``next_step``, as no progress.

    ``target.claimed``: the semantic guard judges the result instead of taking it.
    """

    accepted: bool
    target: Target = Target()
    reason: str = ""
    next_step: str = ""


def target_of(node: TaskNode, skill_target: str, calls: Sequence[EvidenceHead]) -> Target:
    """The plan's target, else the skill's, else the first write that was called."""
    if node.target:
        return Target(node.target, node.target_claimed)
    if skill_target:
        return Target(skill_target)
    writes = [call for call in calls if call.side_effect is SideEffect.WRITE]
    first = min(writes, key=lambda call: (call.started_at or 0, call.round), default=None)
    return Target(first.tool_name, claimed=True) if first else Target()


def judge_finish(
    node: TaskNode, skill_target: str, calls: Sequence[EvidenceHead], *, has_conclusion: bool
) -> GateVerdict:
    """Whether the node may finish. ``calls``: the evidence of the node and of all its delegates."""
    target = target_of(node, skill_target, calls)
    if not has_conclusion or not target.tool:
        return GateVerdict(True, target)
    waiting = [c for c in calls if c.side_effect is SideEffect.WRITE and c.status in OPEN_WRITE]
    if waiting:
        return GateVerdict(
            False,
            target,
            f"the outcome of {waiting[0].tool_name} ({waiting[0].evidence_id}) is not known",
            "finish without a conclusion, or wait until the outcome is verified",
        )
    done = any(
        call.tool_name == target.tool and call.status is CallStatus.SUCCESS and call.business_ok
        for call in calls
    )
    if done:
        return GateVerdict(True, target)
    return GateVerdict(
        False,
        target,
        f"{target.tool} has not succeeded, and this step is complete only with it",
        f"call {target.tool}, ask the user for what is missing, or finish without a conclusion",
    )
