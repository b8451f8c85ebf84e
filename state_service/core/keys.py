"""Redis keys (state document 2.1): ``<prefix>{organ:conversation}:<suffix>``, one slot for all.

Ids are checked at the door (no brace, colon, space), so a key can never reach another conversation.
Suffixes only: the adapter puts prefix and hash tag in front. Keys beyond the document's table:
``lock`` (D1: under the same tag), ``unresolved`` (writes of unknown outcome in any task), ``dirty``
and ``outbox`` (what SQL has not seen), ``keys`` (which group keys exist), ``actions`` (a list, so
that an action costs its own size), ``events`` and ``run`` (what watchers read).
"""

from __future__ import annotations

PREFIX = "g2rain:rt:"

STATE = "state"
LOCK = "lock"
DIALOGUE = "dialogue"
RECORDS = "records"
ENTITIES = "entities"
SHARED = "shared"
UNRESOLVED = "unresolved"
DIRTY = "dirty"
OUTBOX = "outbox"
KEYS = "keys"

# Every conversation has these (when not empty); all others are listed in ``keys``.
CONVERSATION_KEYS = (STATE, DIALOGUE, RECORDS, ENTITIES, SHARED, UNRESOLVED, DIRTY, OUTBOX, KEYS)

EDGES_FIELD = "_edges"  # field of a task's graph hash


def tag(organ_id: str, conversation_id: str) -> str:
    return "{" + organ_id + ":" + conversation_id + "}"


def metadata(task_id: str) -> str:
    """The task group's sentinel: while it is there, a missing member means "none" (D13)."""
    return f"task:{task_id}:metadata"


def graph(task_id: str) -> str:
    return f"task:{task_id}:graph"


def checkpoint(task_id: str) -> str:
    return f"task:{task_id}:checkpoint"


def task_shared(task_id: str) -> str:
    return f"task:{task_id}:shared"


def prior(task_id: str) -> str:
    return f"task:{task_id}:prior"


def writes(task_id: str) -> str:
    return f"task:{task_id}:writes"


def space(task_id: str, node_id: str) -> str:
    return f"task:{task_id}:node:{node_id}:space"


def actions(task_id: str, node_id: str) -> str:
    return f"task:{task_id}:node:{node_id}:actions"


def evidence(task_id: str, node_id: str) -> str:
    return f"task:{task_id}:node:{node_id}:evidence"


def payload(task_id: str, evidence_id: str) -> str:
    return f"task:{task_id}:payload:{evidence_id}"


def events(run_id: str) -> str:
    return f"events:{run_id}"


def run(run_id: str) -> str:
    return f"run:{run_id}"


def is_listed(suffix: str) -> bool:
    """Whether a key is one of those that the ``keys`` set lists."""
    return suffix.startswith(("task:", "events:", "run:"))


def is_of_task(suffix: str, task_id: str) -> bool:
    return suffix.startswith(f"task:{task_id}:")


def write_field(tool_name: str, idempotency_key: str) -> str:
    """Field of ``writes`` and ``unresolved``: ``toolName|idempotencyKey``."""
    return f"{tool_name}|{idempotency_key}"
