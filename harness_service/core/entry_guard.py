"""The entry guard: what a request may do before any model is asked (state document 5.3).

Resume actions are typed fields; text is never read as a confirmation (D87).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from harness_service.core.checkpoint import DEFAULT_RESUME, is_expired
from harness_service.core.replies import Reply
from turnfence.axes import CallStatus, CheckpointType, ResumeAction
from turnfence.errors import invalid
from turnfence.records import EvidenceHead, TaskCheckpoint


class GuardKind(StrEnum):
    PASS = "PASS"  # noqa: S105 - a verdict, no password
    RESUME = "RESUME"  # ``action`` answers the checkpoint
    REPLY = "REPLY"  # answer with ``notice``; no task is touched
    DISPATCH = "DISPATCH"  # a checkpoint is open and there is text: the intent decision judges
    SWITCH_AGENT = "SWITCH_AGENT"  # the requested agent is not the task's
    RECONFIRM = "RECONFIRM"  # an expired approval: show a fresh one with a new id, run nothing (D55)
    VERIFY_FIRST = "VERIFY_FIRST"  # a write's outcome is unknown: its VERIFY precedes everything
    CANCEL_TASK = "CANCEL_TASK"  # CANCEL with no checkpoint but an unresolved write: give the task up


class GuardDecision(msgspec.Struct, frozen=True):
    """``with_prompt``: the notice also shows the checkpoint that is really open."""

    kind: GuardKind
    action: ResumeAction | None = None
    notice: Reply | None = None
    with_prompt: bool = False


PASS = GuardDecision(GuardKind.PASS)
DISPATCH = GuardDecision(GuardKind.DISPATCH)
SWITCH_AGENT = GuardDecision(GuardKind.SWITCH_AGENT)
RECONFIRM = GuardDecision(GuardKind.RECONFIRM)
VERIFY_FIRST = GuardDecision(GuardKind.VERIFY_FIRST)
CANCEL_TASK = GuardDecision(GuardKind.CANCEL_TASK)

_NEEDS_CHECKPOINT_ID = frozenset({ResumeAction.CONFIRM, ResumeAction.REJECT})


def require_checkpoint_id(action: ResumeAction | None, checkpoint_id: str) -> None:
    """Admission: CONFIRM and REJECT must say what they answer (D52), else INVALID_REQUEST."""
    if action in _NEEDS_CHECKPOINT_ID and not checkpoint_id:
        raise invalid("checkpoint_id", f"required with action {action}")


def decide(
    *,
    action: ResumeAction | None,
    has_text: bool,
    checkpoint: TaskCheckpoint | None,
    checkpoint_id: str = "",
    requested_agent: str = "",
    task_agent: str = "",
    now_ms: int = 0,
    reconfirm_after_ms: int = 0,
    unresolved_write: EvidenceHead | None = None,
) -> GuardDecision:
    """The table of 5.3 with wire.md's ``checkpoint_id`` rules.

    ``checkpoint``: the active one. ``unresolved_write``: see ``write_to_verify``; it comes before the
    table when no checkpoint is open, or when the open approval is for that very write (D54).
    """
    if checkpoint is None:
        return _without_checkpoint(action, has_text, checkpoint_id, unresolved_write)
    if checkpoint_id and checkpoint_id != checkpoint.checkpoint_id:
        return _reply(Reply.CHECKPOINT_NOT_ACTIVE, with_prompt=True)
    if unresolved_write is not None and _supersedes(unresolved_write, checkpoint):
        return CANCEL_TASK if action is ResumeAction.CANCEL else VERIFY_FIRST
    if has_text and requested_agent and task_agent and requested_agent != task_agent:
        return SWITCH_AGENT
    if action is None and has_text:
        return DISPATCH
    return _answer(action or DEFAULT_RESUME[checkpoint.type], checkpoint, now_ms, reconfirm_after_ms)


def decide_continue(checkpoint: TaskCheckpoint | None, now_ms: int, reconfirm_after_ms: int) -> GuardDecision:
    """What CONTINUE_TASK, decided from text, means for the open checkpoint.

    The answer to a question resumes its node; an approval or a verification needs a typed action, so
    its prompt is shown again.
    """
    if checkpoint is None:
        return PASS
    return _answer(DEFAULT_RESUME[checkpoint.type], checkpoint, now_ms, reconfirm_after_ms)


def write_to_verify(unresolved: Sequence[EvidenceHead], task_id: str) -> EvidenceHead | None:
    """The first write of this task whose outcome nobody knows (one at a time, D47)."""
    unknown = [head for head in unresolved if head.task_id == task_id and head.status is CallStatus.UNKNOWN]
    return min(unknown, key=lambda head: (head.started_at or 0, head.evidence_id), default=None)


def _without_checkpoint(
    action: ResumeAction | None, has_text: bool, checkpoint_id: str, unresolved_write: EvidenceHead | None
) -> GuardDecision:
    if unresolved_write is not None:
        return CANCEL_TASK if action is ResumeAction.CANCEL else VERIFY_FIRST
    if action in (ResumeAction.CONFIRM, ResumeAction.REJECT, ResumeAction.CANCEL):
        return _reply(Reply.NO_PENDING_ACTION)
    if checkpoint_id:
        return _reply(Reply.CHECKPOINT_NOT_ACTIVE)
    if not has_text:
        return _reply(Reply.EMPTY_MESSAGE)
    return PASS


def _answer(
    action: ResumeAction | None, checkpoint: TaskCheckpoint, now_ms: int, reconfirm_after_ms: int
) -> GuardDecision:
    expired = checkpoint.type is CheckpointType.APPROVAL and is_expired(
        checkpoint, now_ms, reconfirm_after_ms
    )
    if expired and action in (None, ResumeAction.CONFIRM):
        return RECONFIRM
    if action is None:
        return _reply(Reply.CHOOSE_ACTION, with_prompt=True)
    if action not in checkpoint.allowed_actions:
        return _reply(Reply.ACTION_NOT_ALLOWED, with_prompt=True)
    return GuardDecision(GuardKind.RESUME, action=action)


def _supersedes(write: EvidenceHead, checkpoint: TaskCheckpoint) -> bool:
    pending = checkpoint.pending_action
    return (
        checkpoint.type is CheckpointType.APPROVAL
        and pending is not None
        and (pending.tool_name, pending.args_hash) == (write.tool_name, write.args_hash)
    )


def _reply(notice: Reply, *, with_prompt: bool = False) -> GuardDecision:
    return GuardDecision(GuardKind.REPLY, notice=notice, with_prompt=with_prompt)
