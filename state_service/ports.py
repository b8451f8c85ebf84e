"""What the state service needs from its two stores. The contract is written here, and tested as such.

Adapters raise ``StoreUnavailable`` when a store cannot be reached, answers too late or is out of
memory, ``StoreCorrupt`` when stored bytes are of another shape; driver errors never pass. A call is
bounded by the adapter's own time-outs. No adapter retries what it sends: retries belong to the
story, where identity makes them safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Any, Protocol

import msgspec

from turnfence import records as r
from turnfence.axes import StreamState


class StoreUnavailable(Exception):
    """The store could not be reached, or could not do it in time. What it did is unknown."""


class StoreCorrupt(Exception):
    """A stored value is not what was written: another shape, or another conversation's."""


class Clock(Protocol):
    def now_ms(self) -> int: ...

    def monotonic(self) -> float: ...


class Scope(msgspec.Struct, frozen=True):
    """One conversation of one organisation: the unit of locking, fencing and hashing."""

    organ_id: str
    conversation_id: str


# --- the hot store --------------------------------------------------------------------------------


class Code(IntEnum):
    """Answer of a fenced script (D10): loss, conflict and repetition are told apart."""

    APPLIED = 1
    ALREADY = 2
    FENCED = 0
    MISSING = -1  # the state key, or its data stamp, is gone
    GAP = -2  # not the next flush sequence, or the same one with other content
    LOST = -3  # the data sequence is behind what the turn was told


class OpName(StrEnum):
    """What flush.lua can do. LREM of the specification is not in use: lists are trimmed by place."""

    HSET = "HSET"  # key, field, value
    HDEL = "HDEL"  # key, field
    SET = "SET"  # key, value
    DEL = "DEL"  # key
    LPUSH_TRIM = "LPUSH_TRIM"  # key, value, number = how many to keep (head is newest)
    JAPPEND = "JAPPEND"  # key, field, value: append one JSON value to the JSON array in a hash field
    EXPIRE = "EXPIRE"  # key, number = ms
    XADD = "XADD"  # key, field = event sequence (the entry's id is <sequence>-0), value; present: no-op
    DIRTY = "DIRTY"  # field = member: mark with this write's data sequence
    OUTBOX = "OUTBOX"  # field = member, value: bytes that wait for SQL; marks the member dirty too
    UNLIST = "UNLIST"  # key: take it out of the ``keys`` set; it goes by its own time-out
    CLEAN = "CLEAN"  # field = member, number = data sequence: unmark unless it changed since
    UNLOCK = "UNLOCK"  # delete the lock if the turn's token holds it


class Op(msgspec.Struct, frozen=True):
    """One operation. ``key`` is the part after ``<prefix>{organ:conversation}:``; DIRTY, OUTBOX,
    CLEAN and UNLOCK have none. HSET, SET, LPUSH_TRIM, JAPPEND and XADD also set the key's TTL to
    the call's ``ttl`` (and put keys of task groups, events and runs into the ``keys`` set)."""

    op: OpName
    key: str = ""
    field: str = ""
    value: str = ""
    number: int = 0


class Phase(StrEnum):
    """Where in a turn a write belongs."""

    TURN = ""
    BEGIN = "BEGIN"  # FENCED once the turn has flushed: a begin that is late mends nothing any more
    RECOVERY = "RECOVERY"  # as BEGIN, and the data version stays: what is not merged yet looks no newer


class Applied(msgspec.Struct, frozen=True):
    code: Code
    data_seq: int


class Acquisition(StrEnum):
    ACQUIRED = "ACQUIRED"
    BUSY = "BUSY"  # somebody else holds the lock
    UNKNOWN = "UNKNOWN"  # the hot store does not know the conversation and no baseline was given
    FORBIDDEN = "FORBIDDEN"  # it belongs to another user
    DELETED = "DELETED"


class Acquired(msgspec.Struct, frozen=True):
    """Answer of renew.lua; only ACQUIRED has written anything."""

    kind: Acquisition
    version: int = 0
    token: str = ""
    data_version: int = 0  # 0: there is no hot data
    data_seq: int = 0
    previous_run: str = ""  # owner that did not finish; never this run itself
    busy_for_ms: int = 0  # rest of the holder's lease


class Read(msgspec.Struct, frozen=True):
    """One plain read: HGETALL, HGET, GET, LRANGE, SMEMBERS, ZRANGE (WITHSCORES), XRANGE, EXISTS."""

    command: str
    key: str
    args: tuple[str | int, ...] = ()


class Found(msgspec.Struct, frozen=True):
    """What register.lua found instead of registering: the writes-index value, and where."""

    entry: r.WriteIndexEntry
    task_id: str
    node_id: str
    same_task: bool


class Registered(msgspec.Struct, frozen=True):
    """``found`` None and code APPLIED: STARTED is registered. ALREADY: this evidence id was there."""

    code: Code
    data_seq: int
    found: Found | None = None


class Lease(msgspec.Struct, frozen=True):
    held: bool
    cancel: str = ""


class HotStore(Protocol):
    """Redis. All scripts are idempotent by identity and write nothing unless all their input is good."""

    async def acquire(
        self,
        scope: Scope,
        *,
        run_id: str,
        user_id: str,
        token: str,
        lease_ms: int,
        ttl_ms: int,
        now_ms: int,
        baseline: int | None,
    ) -> Acquired:
        """renew.lua: lock and renew in one step (B1). ``baseline``: the largest version SQL knows;
        None while SQL was not asked. The new version is one above both. The same run again gets the
        same answer, unless the baseline has overtaken it."""
        ...

    async def undo_acquire(self, turn: r.TurnRef, *, previous_run: str) -> None:
        """Take back an acquire whose claim was refused: owner restored, lock released, and no key
        left where the conversation was unknown."""
        ...

    async def apply(
        self,
        turn: r.TurnRef,
        ops: Sequence[Op],
        *,
        ttl_ms: int,
        now_ms: int,
        sequence: int = 0,
        stamp: tuple[int, int] | None = None,
        base_seq: int | None = None,
        phase: Phase = Phase.TURN,
    ) -> Applied:
        """flush.lua: all ops or none, under the fence (version and owner equal). ``sequence`` > 0:
        only as the turn's next flush (a repeat with the same content answers ALREADY). ``stamp``:
        only while the data stamp is still (dataVersion, dataSeq) as seen; (0, 0) for none.
        ``base_seq``: continue the data sequence from here at least (after a rehydration)."""
        ...

    async def register_write(
        self,
        turn: r.TurnRef,
        *,
        head: r.EvidenceHead,
        index_field: str,
        ops: Sequence[Op],
        ttl_ms: int,
        now_ms: int,
    ) -> Registered:
        """register.lua (S2, Redis half): look ``toolName|idempotencyKey`` up in the task's ``writes``
        and the conversation's ``unresolved``; if nothing bars it, write the STARTED head, both
        indexes and ``ops`` in the same step. Bars: STARTED, UNKNOWN, UNKNOWN_PRE_CALL anywhere in
        the conversation; SUCCESS with businessOk, or a ``notBefore`` in the future, in the task."""
        ...

    async def extend_lease(self, turn: r.TurnRef, *, lease_ms: int) -> Lease:
        """lease.lua: compare-and-extend; brings back the reason of a cancel asked for elsewhere."""
        ...

    async def request_cancel(self, scope: Scope, run_id: str, reason: str) -> bool:
        """cancel.lua: leave a reason for the run's next heartbeat. False: the run holds no lock."""
        ...

    async def abandon(
        self, scope: Scope, run_id: str, ops: Sequence[Op], *, ttl_ms: int, now_ms: int
    ) -> bool:
        """abandon.lua: if the run still owns the conversation, apply ``ops`` (outbox, events) and
        release its lock; the owner mark stays for the next begin. False: it owns nothing."""
        ...

    async def bury(self, scope: Scope, doomed: Sequence[str], *, version: int, ttl_ms: int) -> None:
        """bury.lua: delete state, lock and ``doomed``, and leave a tombstone with at least ``version``."""
        ...

    async def read(self, scope: Scope, reads: Sequence[Read]) -> list[Any]:
        """Plain reads in one round trip, decoded to str: hashes as dict[str, str], lists and sets as
        list[str], ZRANGE as list[tuple[str, int]], XRANGE as list[tuple[int sequence, str value]]."""
        ...

    async def wait_events(
        self, scope: Scope, run_id: str, after: int, *, block_ms: int
    ) -> list[tuple[int, str]]:
        """Events of a run after a sequence; waits up to ``block_ms`` when there are none yet."""
        ...

    async def close(self) -> None: ...


# --- the cold store -------------------------------------------------------------------------------


class ConversationRow(msgspec.Struct, frozen=True):
    user_id: str
    title: str
    active_task_id: str
    session_shared: dict[str, r.Sourced]
    state_version: int
    persist_seq: int
    fence_version: int
    deleted: bool
    fence_trace: str = ""
    updated_at: int | None = None


class RunStart(msgspec.Struct, frozen=True):
    """The run row that the claim creates (RUNNING). Without ``message_id`` it is a recovery, and no run."""

    run_id: str
    message_id: str
    input_hash: str
    query: str
    agent_id: str
    started_at: int


class CallRow(msgspec.Struct, frozen=True):
    """A tool_call_record row as a head, with the version of the turn that wrote it."""

    head: r.EvidenceHead
    version: int


class ClaimKind(StrEnum):
    CLAIMED = "CLAIMED"
    BEHIND = "BEHIND"  # fence_version is not below the version: acquire again with this baseline
    KNOWN_MESSAGE = "KNOWN_MESSAGE"
    FORBIDDEN = "FORBIDDEN"
    DELETED = "DELETED"


class Claim(msgspec.Struct, frozen=True):
    """Answer of ``claim``. For KNOWN_MESSAGE nothing was written and ``existing`` is the run with
    its input hash; without ``existing`` it is another user's. ``messages`` and ``calls`` are what S1–S3
    may have left in SQL alone (row version from ``row.state_version`` on: the last turn that persisted may
    have written to SQL what Redis lost); ``unfinished``: runs still RUNNING below ours."""

    kind: ClaimKind
    row: ConversationRow | None = None
    fence_version: int = 0
    existing: r.Run | None = None
    existing_hash: str = ""
    messages: tuple[r.DialogueMessage, ...] = ()
    calls: tuple[CallRow, ...] = ()
    unfinished: tuple[str, ...] = ()


class TaskRows(msgspec.Struct, frozen=True):
    """One task group from one consistent snapshot. ``spaces``: node id → full node space."""

    metadata: r.TaskMetadata
    nodes: tuple[r.TaskNode, ...]
    edges: tuple[r.TaskEdge, ...]
    checkpoint: r.TaskCheckpoint | None
    shared: dict[str, r.Sourced]
    prior: r.Prior | None
    spaces: dict[str, r.NodeSpace]
    calls: tuple[r.EvidenceHead, ...]


class ConversationRows(msgspec.Struct, frozen=True):
    """Everything a rehydration needs, from one consistent snapshot; dialogue oldest first."""

    row: ConversationRow
    dialogue: tuple[r.DialogueMessage, ...]
    records: tuple[r.TaskRecord, ...]
    entities: dict[str, r.EntityEntry]
    task: TaskRows | None
    unresolved: tuple[r.EvidenceHead, ...]


class RunEnd(msgspec.Struct, frozen=True):
    """How a run ended, as it goes to its row. ``prepared``: a turn_commit row belongs to it."""

    run: r.Run
    closing_events: tuple[r.TurnEvent, ...]
    prepared: bool
    persist_seq: int = 0
    published_result: str = ""


class PersistBatch(msgspec.Struct, frozen=True):
    """What one persist or drain writes, all in one transaction; idempotent by business ids."""

    active_task_id: str
    data_version: int
    persist_seq: int
    title: str | None = None
    session_shared: dict[str, r.Sourced] | None = None
    messages: tuple[r.DialogueMessage, ...] = ()
    tasks: tuple[r.TaskMetadata, ...] = ()
    task_shared: dict[str, dict[str, r.Sourced]] = {}
    priors: dict[str, r.Prior] = {}
    records: dict[str, r.TaskRecord] = {}
    nodes: tuple[tuple[str, r.TaskNode], ...] = ()  # (task id, node)
    spaces: dict[tuple[str, str], r.NodeSpace] = {}  # (task id, node id)
    edges: tuple[tuple[str, r.TaskEdge], ...] = ()
    checkpoints: dict[str, r.TaskCheckpoint] = {}
    checkpoints_gone: tuple[str, ...] = ()  # checkpoint ids
    resumes: tuple[r.ResumeRecord, ...] = ()
    calls: tuple[r.EvidenceHead, ...] = ()
    call_payloads: dict[str, str] = {}  # evidence id → payload JSON (of those not yet in SQL)
    entities: dict[str, r.EntityEntry | None] = {}  # type:id → entry; None: removed
    traces: tuple[tuple[str, r.TraceEvent], ...] = ()  # (run id, event)
    run_ends: tuple[RunEnd, ...] = ()


class Commit(StrEnum):
    DONE = "DONE"
    FENCED = "FENCED"  # another turn holds the fence; nothing was written
    OLDER = "OLDER"  # SQL has a newer stamp than the batch: Redis went back; nothing was written
    ENDED = "ENDED"  # written, but the turn's own run had another end before: that one counts


class S2(StrEnum):
    INSERTED = "INSERTED"
    MINE = "MINE"  # this evidence id is registered already
    DUPLICATE = "DUPLICATE"  # a live row with the same key, or an unresolved one in any task
    FENCED = "FENCED"


class S2Result(msgspec.Struct, frozen=True):
    kind: S2
    head: r.EvidenceHead | None = None


class ColdCall(msgspec.Struct, frozen=True):
    """One settlement as SQL gets it. ``payload_json`` empty: none."""

    head: r.EvidenceHead
    request_json: str
    payload_json: str


class ColdStore(Protocol):
    """SQL. Every method is one transaction (or one consistent read) scoped by organisation, runs in
    a task that a cancelled caller never tears apart, and repeats itself whole on a deadlock or lock
    time-out (bounded). Fenced methods require ``fence_version = turn.version`` and
    ``fence_trace = turn.run_id`` on the locked conversation row, and answer False / FENCED if not."""

    async def conversation(self, scope: Scope) -> ConversationRow | None: ...

    async def claim(self, scope: Scope, *, user_id: str, version: int, start: RunStart, now_ms: int) -> Claim:
        """B2: create the conversation row if there is none, raise its fence to ``version`` for this
        run, create the run row. Again with the same run and version: the same answer."""
        ...

    async def load_conversation(
        self, scope: Scope, *, dialogue_max: int, records_max: int
    ) -> ConversationRows | None: ...

    async def load_task(self, scope: Scope, task_id: str) -> TaskRows | None: ...

    async def insert_message(self, turn: r.TurnRef, message: r.DialogueMessage) -> bool:
        """S1, idempotent by message id."""
        ...

    async def register_call(self, turn: r.TurnRef, head: r.EvidenceHead, request_json: str) -> S2Result:
        """S2: a plain INSERT under the fence, never an upsert."""
        ...

    async def settle_calls(self, turn: r.TurnRef, calls: Sequence[ColdCall]) -> bool:
        """S3: UPDATE by call id, else INSERT; a head with ``payload_id`` puts its payload into
        task_node_payload, others into ``response``. A live key goes NULL when no longer live."""
        ...

    async def put_payload(self, turn: r.TurnRef, *, payload_id: str, payload_type: str, data: str) -> bool:
        """A large node-space field (OUTPUT), before its placeholder is flushed."""
        ...

    async def persist(self, turn: r.TurnRef, batch: PersistBatch, *, now_ms: int) -> Commit:
        """The commit, safe to repeat. Raises ``StoreUnavailable`` when the outcome is unknown."""
        ...

    async def committed(self, organ_id: str, run_id: str) -> bool:
        """Whether the run's turn_commit row exists, asked on a fresh connection."""
        ...

    async def interrupt(self, turn: r.TurnRef, ends: Sequence[RunEnd]) -> bool:
        """Record, under the fence, the end of runs that left none. One that has an end keeps it."""
        ...

    async def give_up(self, scope: Scope, end: RunEnd) -> None:
        """Record a run's end outside the fence, by the run itself. One that has an end keeps it."""
        ...

    async def calls(self, scope: Scope, evidence_ids: Sequence[str]) -> list[r.EvidenceHead]:
        """The calls of these ids, as far as SQL knows them."""
        ...

    async def append_late_trace(self, scope: Scope, run_id: str, trace: r.TraceEvent) -> None:
        """A note about its own end by a turn that is fenced out; outside the fence, append-only."""
        ...

    async def run(self, organ_id: str, user_id: str, run_id: str) -> r.Run | None:
        """None when unknown or another user's. ``durability`` from turn_commit."""
        ...

    async def run_by_message(self, organ_id: str, message_id: str) -> tuple[r.Run, str, str] | None:
        """(run, its input hash, its user id) of a message id in the organisation."""
        ...

    async def closing_events(self, organ_id: str, run_id: str) -> tuple[r.TurnEvent, ...]: ...

    async def previous_turn(self, scope: Scope) -> r.PreviousTurn | None:
        """The last turn of the conversation, if it was DIAGNOSIS + SUCCESS with a published result."""
        ...

    async def node_dialogue(
        self, scope: Scope, task_id: str, node_id: str
    ) -> tuple[r.DialogueMessage, ...]: ...

    async def call_requests(self, scope: Scope, evidence_ids: Sequence[str]) -> dict[str, str]:
        """Evidence id → the request JSON its call was registered with, of those that have one."""
        ...

    async def call_payload(self, scope: Scope, task_id: str, evidence_id: str) -> str | None:
        """``response``, else the payload its ``payload_id`` points to."""
        ...

    async def payload(self, scope: Scope, payload_id: str) -> str | None: ...

    async def close(self) -> None: ...


# --- the read side --------------------------------------------------------------------------------

# Where a listing goes on: the sort values of the last row it gave. Empty: from the start, or: the end.
Cursor = tuple[int, ...]


class Page(msgspec.Struct, frozen=True):
    """``size`` rows at most, newest first, after the cursor."""

    size: int
    after: Cursor = ()


class HistoryStore(Protocol):
    """SQL, read by others than the turn. Each answer is one page and the cursor of the next ("()": none)."""

    async def conversations(
        self, organ_id: str, user_id: str, page: Page
    ) -> tuple[list[r.Conversation], Cursor]: ...

    async def messages(self, scope: Scope, page: Page) -> tuple[list[r.DialogueMessage], Cursor]: ...

    async def tasks(self, scope: Scope, page: Page) -> tuple[list[r.TaskMetadata], Cursor]: ...

    async def runs(
        self, organ_id: str, user_id: str, conversation_id: str, page: Page
    ) -> tuple[list[r.Run], Cursor]:
        """The user's runs, of one conversation if it is named."""
        ...

    async def trace(self, organ_id: str, run_id: str, page: Page) -> tuple[list[r.TraceEvent], Cursor]: ...

    async def evidence(
        self, organ_id: str, run_id: str, page: Page
    ) -> tuple[list[r.EvidenceHead], Cursor]: ...

    async def record_stream_end(
        self, organ_id: str, run_id: str, stream_state: StreamState, last_sequence: int
    ) -> bool:
        """How the stream really ended, of a run that has ended; the first one stays. True: recorded."""
        ...


# --- upkeep ---------------------------------------------------------------------------------------


class Forgotten(msgspec.Struct, frozen=True):
    """A conversation that wants care, and whose it is."""

    scope: Scope
    user_id: str
    fence_version: int = 0


class UpkeepStore(Protocol):
    """SQL for the sweeper and for deletion: the only methods that look across organisations."""

    async def unfinished(self, before_ms: int, limit: int) -> list[Forgotten]:
        """Conversations with a run that is RUNNING since before then, oldest first."""
        ...

    async def aged(self, before_ms: int, limit: int) -> list[Forgotten]:
        """Conversations whose last turn was before then."""
        ...

    async def half_erased(self, limit: int) -> list[tuple[Scope, int]]:
        """Buried conversations of which something may be left, with the version of their tombstone."""
        ...

    async def bury(self, scope: Scope, user_id: str, now_ms: int) -> int | None:
        """Mark the row as deleted and move its fence above every turn's, in one step. The tombstone's
        version, by a repeat too; None: there is no such conversation of this user."""
        ...

    async def recent_runs(self, scope: Scope, since_ms: int) -> list[str]:
        """Runs of a buried conversation that were written since then: Redis may still have their events."""
        ...

    async def erase_some(self, scope: Scope, limit: int) -> int:
        """Erase at most ``limit`` rows of a buried conversation; 0: nothing is left but the tombstone."""
        ...

    async def erased(self, scope: Scope) -> None:
        """Note that nothing is left."""
        ...

    async def drop_payloads(self, before_ms: int, limit: int) -> int: ...

    async def drop_traces(self, before_ms: int, limit: int) -> int: ...
