"""Checkpoints: what a suspended task asks, what may be answered, what an answer does (state 5.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from harness_service.core.canonical import canonical, parse_json, sha256_hex
from harness_service.core.catalogue import ToolContract
from harness_service.core.display import clean, cut, masked
from harness_service.core.replies import Reply, say
from turnfence.axes import CheckpointType, ResumeAction
from turnfence.errors import Reason, TurnfenceError
from turnfence.records import (
    CheckpointPrompt,
    EvidenceHead,
    PendingAction,
    ShownField,
    TaskCheckpoint,
)

#: State document 3.2; CANCEL on VERIFY is an addition (D46): the write stays UNKNOWN and is listed.
DEFAULT_ACTIONS: Mapping[CheckpointType, tuple[ResumeAction, ...]] = {
    CheckpointType.FOLLOW_UP: (ResumeAction.REPLY, ResumeAction.CANCEL),
    CheckpointType.APPROVAL: (ResumeAction.CONFIRM, ResumeAction.REJECT, ResumeAction.CANCEL),
    CheckpointType.VERIFY: (ResumeAction.CONFIRM, ResumeAction.REJECT, ResumeAction.CANCEL),
}

#: What an answer without an action means; None: an action must be chosen.
DEFAULT_RESUME: Mapping[CheckpointType, ResumeAction | None] = {
    CheckpointType.FOLLOW_UP: ResumeAction.REPLY,
    CheckpointType.APPROVAL: None,
    CheckpointType.VERIFY: None,
}


class ResumeEffect(StrEnum):
    """What the story does with an allowed answer."""

    WAKE_WITH_REPLY = "WAKE_WITH_REPLY"  # the user's words become a message of the node
    EXECUTE_PENDING = "EXECUTE_PENDING"  # check the hash, run the approved write, go on
    DROP_PENDING = "DROP_PENDING"  # never run it; node CANCELLED, task CANCELED
    SETTLE_EFFECTIVE = "SETTLE_EFFECTIVE"  # UNKNOWN → SUCCESS, not run again
    SETTLE_NOT_EFFECTIVE = "SETTLE_NOT_EFFECTIVE"  # UNKNOWN → FAILED, may be issued anew
    CANCEL_TASK = "CANCEL_TASK"  # node CANCELLED, task CANCELED


RESUME_EFFECTS: Mapping[tuple[CheckpointType, ResumeAction], ResumeEffect] = {
    (CheckpointType.FOLLOW_UP, ResumeAction.REPLY): ResumeEffect.WAKE_WITH_REPLY,
    (CheckpointType.FOLLOW_UP, ResumeAction.CANCEL): ResumeEffect.CANCEL_TASK,
    (CheckpointType.APPROVAL, ResumeAction.CONFIRM): ResumeEffect.EXECUTE_PENDING,
    (CheckpointType.APPROVAL, ResumeAction.REJECT): ResumeEffect.DROP_PENDING,
    (CheckpointType.APPROVAL, ResumeAction.CANCEL): ResumeEffect.CANCEL_TASK,
    (CheckpointType.VERIFY, ResumeAction.CONFIRM): ResumeEffect.SETTLE_EFFECTIVE,
    (CheckpointType.VERIFY, ResumeAction.REJECT): ResumeEffect.SETTLE_NOT_EFFECTIVE,
    (CheckpointType.VERIFY, ResumeAction.CANCEL): ResumeEffect.CANCEL_TASK,
}

LABEL_MAX_CHARS = 60
VALUE_MAX_CHARS = 200
QUESTION_MAX_CHARS = 4000
FIELDS_MAX = 40
LIST_MAX = 20


class FieldView(msgspec.Struct, frozen=True):
    """What an approval shows: ``hidden`` fields did not fit and are counted in the question."""

    fields: tuple[ShownField, ...]
    hidden: int = 0


def shown_fields(tool: ToolContract, arguments: Any) -> FieldView:
    """One line for each argument: label, cleaned and masked value, cut visibly.

    What the platform injects and the idempotency key's argument are not shown.
    """
    unseen = {name for name, rule in tool.args.items() if rule.inject} | {tool.pass_key_as}
    visible = {name: value for name, value in arguments.items() if name not in unseen}
    lines = [
        ShownField(
            label=clean(tool.labels.get(path, path), LABEL_MAX_CHARS), value=_shown_value(value), path=path
        )
        for path, value in _leaves(masked(visible, tool.mask))
    ]
    return FieldView(tuple(lines[:FIELDS_MAX]), max(0, len(lines) - FIELDS_MAX))


def summary_of(checkpoint: TaskCheckpoint, locale: str) -> str:
    """The fields in one line, for "cancelled, not executed: …"."""
    lines = [say(Reply.FIELD, locale, label=f.label, value=f.value) for f in checkpoint.fields]
    return cut("; ".join(lines), QUESTION_MAX_CHARS) or checkpoint.question


def follow_up(
    *,
    checkpoint_id: str,
    node_id: str,
    question: str,
    expected_fields: Sequence[str] = (),
    suggestions: Sequence[str] = (),
    now_ms: int,
) -> TaskCheckpoint:
    """The model's question to the user: model text, cleaned and bounded."""
    return TaskCheckpoint(
        checkpoint_id=checkpoint_id,
        type=CheckpointType.FOLLOW_UP,
        node_id=node_id,
        question=clean(question, QUESTION_MAX_CHARS, keep_lines=True),
        allowed_actions=list(DEFAULT_ACTIONS[CheckpointType.FOLLOW_UP]),
        suggestions=[clean(text, VALUE_MAX_CHARS) for text in suggestions[:LIST_MAX]],
        expected_fields=[clean(text, LABEL_MAX_CHARS) for text in expected_fields[:LIST_MAX]],
        created_at=now_ms,
    )


def approval(
    *,
    checkpoint_id: str,
    node_id: str,
    tool: ToolContract,
    args_json: str,
    args_hash: str,
    now_ms: int,
    reconfirm_after_ms: int,
    locale: str,
) -> TaskCheckpoint:
    """Ask before a write. ``args_json``: the exact canonical text that was hashed (D49)."""
    view = shown_fields(tool, parse_json(args_json))
    lines = [say(Reply.APPROVE, locale, tool=tool.name)]
    lines += [say(Reply.FIELD, locale, label=field.label, value=field.value) for field in view.fields]
    if view.hidden:
        lines.append(say(Reply.MORE_FIELDS, locale, count=str(view.hidden)))
    return TaskCheckpoint(
        checkpoint_id=checkpoint_id,
        type=CheckpointType.APPROVAL,
        node_id=node_id,
        question="\n".join(lines),
        allowed_actions=list(DEFAULT_ACTIONS[CheckpointType.APPROVAL]),
        pending_action=PendingAction(tool.name, args_json, args_hash),
        fields=list(view.fields),
        created_at=now_ms,
        expires_at=now_ms + reconfirm_after_ms,
    )


def verification(
    *, checkpoint_id: str, node_id: str, write: EvidenceHead, now_ms: int, locale: str
) -> TaskCheckpoint:
    """Ask whether a write took effect; names its evidence, one write at a time (D47)."""
    summary = clean(write.args_brief, VALUE_MAX_CHARS)
    return TaskCheckpoint(
        checkpoint_id=checkpoint_id,
        type=CheckpointType.VERIFY,
        node_id=node_id,
        question=say(Reply.VERIFY, locale, tool=write.tool_name, summary=summary),
        allowed_actions=list(DEFAULT_ACTIONS[CheckpointType.VERIFY]),
        evidence_id=write.evidence_id,
        created_at=now_ms,
    )


def renewed(
    checkpoint: TaskCheckpoint, *, checkpoint_id: str, now_ms: int, reconfirm_after_ms: int
) -> TaskCheckpoint:
    """The fresh approval that replaces an expired one: same write, new id (D55)."""
    return msgspec.structs.replace(
        checkpoint,
        checkpoint_id=checkpoint_id,
        created_at=now_ms,
        expires_at=now_ms + reconfirm_after_ms,
    )


def is_expired(checkpoint: TaskCheckpoint, now_ms: int, reconfirm_after_ms: int) -> bool:
    """Whether the stored expiry has passed; without one, whether it is older than the limit."""
    expires_at = checkpoint.expires_at
    if expires_at is None:
        expires_at = (checkpoint.created_at or 0) + reconfirm_after_ms
    return now_ms >= expires_at


def prompt_of(checkpoint: TaskCheckpoint) -> CheckpointPrompt:
    """What the caller sees: no arguments, only the masked fields and the hash."""
    pending = checkpoint.pending_action
    shown = pending and PendingAction(pending.tool_name, "", pending.args_hash)
    return CheckpointPrompt(msgspec.structs.replace(checkpoint, pending_action=shown))


def check_pending(pending: PendingAction) -> None:
    """Raise ARGS_HASH_MISMATCH unless the stored bytes are those that were approved."""
    if sha256_hex(pending.args_json.encode()) != pending.args_hash:
        raise TurnfenceError(Reason.ARGS_HASH_MISMATCH)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Scalars (and empty containers) with their dotted paths, in the value's order."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif path:
        yield path, value


def _shown_value(value: Any) -> str:
    whole = clean(value if isinstance(value, str) else canonical(value))
    if len(whole) <= VALUE_MAX_CHARS:
        return whole
    return f"{cut(whole, VALUE_MAX_CHARS)} ({len(whole)})"
