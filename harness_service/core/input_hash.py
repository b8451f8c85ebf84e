"""Whether two messages with one ``message_id`` are the same message (wire.md, ``message_id``)."""

from __future__ import annotations

from harness_service.core.canonical import digest
from turnfence.axes import ResumeAction


def input_hash(text: str, action: ResumeAction | None = None, checkpoint_id: str = "") -> str:
    """SHA-256 in hex of what the caller said: the uncut text, the action and its checkpoint.

    The conversation is no part of it: a caller that lost the answer to its first call repeats the
    message without knowing the conversation it opened.
    """
    return digest({"action": action.value if action else "", "checkpoint_id": checkpoint_id, "text": text})
