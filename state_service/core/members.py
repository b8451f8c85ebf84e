"""Names of dirty members: one for each record that SQL has not seen yet (design: state.md).

A deletion is a member of its own (``…-gone``): what was consumed is known as gone, never guessed
from a missing key. Ids hold no colon, so a name splits back into its parts; only the last part of
an entity's name may hold anything.
"""

from __future__ import annotations

CONVERSATION = "conversation"


def message(message_id: str) -> str:
    return f"message:{message_id}"


def task(task_id: str) -> str:
    return f"task:{task_id}"


def node(task_id: str, node_id: str) -> str:
    return f"node:{task_id}:{node_id}"


def edges(task_id: str) -> str:
    return f"edges:{task_id}"


def checkpoint(task_id: str) -> str:
    return f"checkpoint:{task_id}"


def checkpoint_gone(task_id: str, checkpoint_id: str) -> str:
    return f"checkpoint-gone:{task_id}:{checkpoint_id}"


def resume(resume_id: str) -> str:
    return f"resume:{resume_id}"


def evidence(task_id: str, node_id: str, evidence_id: str) -> str:
    return f"evidence:{task_id}:{node_id}:{evidence_id}"


def payload(task_id: str, evidence_id: str) -> str:
    return f"payload:{task_id}:{evidence_id}"


def entity(key: str) -> str:
    return f"entity:{key}"


def entity_gone(key: str) -> str:
    return f"entity-gone:{key}"


def run(run_id: str) -> str:
    """The end of a run that was given up without being prepared."""
    return f"run:{run_id}"


def commit(run_id: str) -> str:
    """The outcome and closing events of a prepared run."""
    return f"commit:{run_id}"


def trace(run_id: str, sequence: int) -> str:
    return f"trace:{run_id}:{sequence}"


def split(member: str) -> tuple[str, str]:
    """(kind, rest)."""
    kind, _, rest = member.partition(":")
    return kind, rest
