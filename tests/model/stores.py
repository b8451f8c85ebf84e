"""Redis and SQL as the protocol sees them: scripts and transactions are single, atomic steps.

Redis' state is never changed in place, so that any earlier one can come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.model.rules import Unavailable

if TYPE_CHECKING:
    from tests.model.world import World

OPEN = frozenset({"STARTED", "UNKNOWN", "PRE_CALL"})
BARS = OPEN | {"SUCCESS"}


class Ref(NamedTuple):
    """What every write of a turn carries."""

    run: str
    version: int
    token: str


class Call(NamedTuple):
    """Evidence of one write: operation, status, the run that made it, and its version."""

    key: str
    status: str
    run: str
    version: int


class Hot:
    """The conversation in Redis. ``version`` 0: Redis does not know it; ``dv`` 0: no data."""

    __slots__ = (
        "calls", "checkpoint", "created_by", "dirty", "dv", "flush_seq", "given_up", "lock", "messages",
        "node", "outbox", "owner", "prev", "seq", "version", "vtrace",
    )  # fmt: skip

    def __init__(self) -> None:
        self.lock: tuple[str, str] | None = None
        self.version = self.dv = self.seq = self.flush_seq = 0
        self.owner = self.vtrace = self.prev = self.created_by = self.given_up = ""
        self.messages: dict[str, int] = {}
        self.calls: dict[str, Call] = {}
        self.node = self.checkpoint = ""
        self.dirty: dict[str, int] = {}
        self.outbox: dict[str, int] = {}

    def copy(self) -> Hot:
        new = Hot.__new__(Hot)
        new.lock, new.version, new.dv, new.seq = self.lock, self.version, self.dv, self.seq
        new.flush_seq, new.owner, new.vtrace = self.flush_seq, self.owner, self.vtrace
        new.prev, new.created_by, new.given_up = self.prev, self.created_by, self.given_up
        new.messages, new.calls, new.node = self.messages, self.calls, self.node
        new.checkpoint, new.dirty, new.outbox = self.checkpoint, self.dirty, self.outbox
        return new

    # The ops; only on a copy that a script is about to store.

    def mark(self, member: str) -> None:
        self.dirty = {**self.dirty, member: self.seq}

    def append(self, member: str, version: int) -> None:
        self.outbox = {**self.outbox, member: version}
        self.mark(member)

    def say(self, message: str, version: int) -> None:
        if message not in self.messages:
            self.messages = {**self.messages, message: version}
            self.append("m:" + message, version)

    def put_call(self, evidence: str, call: Call, *, dirty: bool = True) -> None:
        self.calls = {**self.calls, evidence: call}
        if dirty:
            self.mark("c:" + evidence)

    def put_node(self, status: str) -> None:
        self.node = status
        self.mark("node")

    def put_checkpoint(self, checkpoint: str) -> None:
        """Open one, or with '' close the open one."""
        if self.checkpoint and not checkpoint:
            self.append("gone:" + self.checkpoint, self.version)
        self.checkpoint = checkpoint
        self.mark("checkpoint")


Change = Callable[[Hot], None]


class Sql:
    """The conversation's rows. Nothing here is ever lost or taken back."""

    __slots__ = (
        "calls", "checkpoint", "commits", "fence", "fence_run", "gone", "messages", "node", "pseq", "run_of",
        "runs", "sv",
    )  # fmt: skip

    def __init__(self) -> None:
        self.sv = self.pseq = self.fence = 0
        self.fence_run = self.node = self.checkpoint = ""
        self.messages: dict[str, int] = {}
        self.calls: dict[str, Call] = {}
        self.commits: dict[str, int] = {}
        self.runs: dict[str, tuple[str, int]] = {}
        self.run_of: dict[str, str] = {}
        self.gone: set[str] = set()


# --- Redis scripts --------------------------------------------------------------------------------


class Acquired(NamedTuple):
    kind: str
    ref: Ref
    prev: str


def acquire(w: World, run: str, token: str, baseline: int | None) -> Acquired:
    """renew.lua: take the lock and raise the version, once per run; the data stamp is not touched."""
    h = w.hot
    if h.lock is not None and h.lock[0] != run:
        return Acquired("BUSY", Ref(run, 0, ""), "")
    if not h.version and baseline is None:
        return Acquired("UNKNOWN", Ref(run, 0, ""), "")
    base = baseline or 0
    if not w.rules.base_max and h.version:
        base = 0
    mine = w.rules.renew_identity and h.version > 0 and h.vtrace == run and h.owner == run
    prev = h.prev if mine else h.owner
    if w.rules.renew_identity and prev == run:
        prev = ""
    new = h.copy()
    if not (mine and h.version > base):
        new.version = max(h.version, base) + 1
        new.owner = new.vtrace = run
        new.prev, new.flush_seq, new.given_up = prev, 0, ""
        if not h.version:
            new.created_by = run
    new.lock = h.lock or (run, token)
    w.leases.add(run)
    w.store(new)
    return Acquired("ACQUIRED", Ref(run, new.version, new.lock[1]), prev)


def undo(w: World, ref: Ref, prev: str) -> None:
    """undo.lua: take back an acquire whose claim was refused."""
    h = w.hot
    new = h.copy()
    if h.lock == (ref.run, ref.token):
        new.lock = None
    if h.version == ref.version and h.owner == ref.run:
        if h.created_by == ref.run and not h.dv:
            kept, new = new.lock, Hot()
            new.lock = kept
        else:
            new.owner, new.vtrace = prev, ""
    w.store(new)


def barred(w: World, ref: Ref, seen: int) -> str:
    h = w.hot
    if not h.version:
        return "MISSING"
    if (
        w.rules.flush_compare
        and w.rules.compare_first
        and (h.version != ref.version or h.owner != ref.run)
    ):
        return "FENCED"
    if w.rules.seen_seq and (h.seq < seen or (seen and not h.dv)):
        return "LOST"
    return ""


def apply(
    w: World,
    ref: Ref,
    change: Change,
    *,
    seen: int = 0,
    sequence: int = 0,
    stamp: tuple[int, int] | None = None,
    base: int = 0,
    prepares: bool = False,
) -> tuple[str, int]:
    """flush.lua: all ops or none, under the fence. Answers a code and the data sequence."""
    h = w.hot
    code = barred(w, ref, seen)
    if code:
        return code, h.seq
    if w.rules.flush_sequence and sequence:
        if sequence == h.flush_seq:
            return "ALREADY", h.seq
        if sequence != h.flush_seq + 1:
            return "GAP", h.seq
    if prepares and h.given_up and w.rules.abandon_bars:
        return "FENCED", h.seq
    if stamp is not None and w.rules.stamp_guard and stamp != (h.dv, h.seq if h.dv else 0):
        return "GAP", h.seq
    w.note_redis_write(ref)
    new = h.copy()
    new.seq = max(h.seq, base) + 1
    new.dv = ref.version
    if sequence:
        new.flush_seq = sequence
    new.created_by = ""
    change(new)
    w.store(new)
    if not w.rules.compare_first and (h.version != ref.version or h.owner != ref.run):
        return "FENCED", new.seq
    return "APPLIED", new.seq


def register(w: World, ref: Ref, seen: int, evidence: str, key: str, consume: str) -> tuple[str, int, str]:
    """register.lua: decide by Redis' index and write STARTED. Answers code, sequence, what was found."""
    code = barred(w, ref, seen)
    h = w.hot
    if code:
        return code, h.seq, ""
    if evidence in h.calls:
        return "ALREADY", h.seq, ""
    for other, call in h.calls.items():
        if call.key == key and bars(w, call.status):
            return "FOUND", h.seq, other
    w.note_redis_write(ref)
    new = h.copy()
    new.seq, new.dv, new.created_by = h.seq + 1, ref.version, ""
    new.put_call(evidence, Call(key, "STARTED", ref.run, ref.version))
    if consume and new.checkpoint == consume:
        new.put_checkpoint("")
    w.store(new)
    return "APPLIED", new.seq, ""


def bars(w: World, status: str) -> bool:
    if status == "UNKNOWN" and not w.rules.unknown_blocks:
        return False
    return status in BARS


def abandon(w: World, run: str) -> str:
    """abandon.lua: free the run's lock; while it owns the conversation, record its failed end.
    Answers PREPARED when the run has an end already, which then counts."""
    h = w.hot
    new = h.copy()
    if h.lock is not None and h.lock[0] == run:
        new.lock = None
    prepared = "commit:" + run in h.outbox
    if h.version and h.owner == run and not h.given_up and not (prepared and w.rules.abandon_keeps_prepared):
        new.seq = h.seq + 1
        new.given_up = run
        new.append("run:" + run, h.version)
    w.store(new)
    return "PREPARED" if prepared and w.rules.abandon_keeps_prepared else ""


# --- SQL transactions -----------------------------------------------------------------------------


class Claim(NamedTuple):
    kind: str
    fence: int
    sv: int = 0
    pseq: int = 0
    messages: tuple[tuple[str, int], ...] = ()
    calls: tuple[tuple[str, Call], ...] = ()
    unfinished: tuple[str, ...] = ()


def holds(w: World, ref: Ref) -> bool:
    return w.sql.fence == ref.version and w.sql.fence_run == ref.run


def claim(w: World, ref: Ref, message: str) -> Claim:
    s, run, version = w.sql, ref.run, ref.version
    known = s.run_of.get(message)
    if known is not None and not (known == run and s.runs[run][0] == "RUNNING"):
        return Claim("KNOWN", s.fence)
    if w.rules.sql_claim:
        if s.fence >= version and (s.fence, s.fence_run) != (version, run):
            return Claim("BEHIND", s.fence)
        s.fence, s.fence_run = version, run
    w.note_claim(ref)
    s.run_of[message] = run
    s.runs[run] = ("RUNNING", version)
    least = s.sv if w.rules.union_all else s.sv + 1
    return Claim(
        "CLAIMED",
        s.fence,
        s.sv,
        s.pseq,
        tuple((m, v) for m, v in s.messages.items() if least <= v < version),
        tuple((e, c) for e, c in s.calls.items() if least <= c.version < version),
        tuple(r for r, (state, v) in s.runs.items() if state == "RUNNING" and v < version),
    )


def insert_message(w: World, ref: Ref, message: str) -> bool:
    """S1."""
    if w.rules.s1_fenced and not holds(w, ref):
        return False
    w.note_sql_write(ref)
    w.sql.messages.setdefault(message, ref.version)
    return True


def register_call(w: World, ref: Ref, evidence: str, key: str) -> tuple[str, str]:
    """S2: answers INSERTED, MINE, DUPLICATE (and of which) or FENCED."""
    s = w.sql
    if w.rules.s2_fenced and not holds(w, ref):
        return "FENCED", ""
    if evidence in s.calls:
        return "MINE", evidence
    if w.rules.s2_dedupe:
        for other, call in s.calls.items():
            if call.key == key and bars(w, call.status):
                return "DUPLICATE", other
    if w.rules.s2_fenced:
        w.note_sql_write(ref)
    s.calls[evidence] = Call(key, "STARTED", ref.run, ref.version)
    return "INSERTED", evidence


def write_call(w: World, evidence: str, call: Call) -> None:
    """UPDATE by id, else INSERT; what is settled is never made unsettled."""
    known = w.sql.calls.get(evidence)
    if w.rules.settled_wins and known is not None and call.status in OPEN and known.status not in OPEN:
        return
    w.sql.calls[evidence] = call


def settle_call(w: World, ref: Ref, evidence: str, call: Call) -> bool:
    """S3."""
    if not holds(w, ref):
        return False
    w.note_sql_write(ref)
    write_call(w, evidence, call)
    return True


class Batch(NamedTuple):
    """What a drain read: stamp, messages, calls, node, checkpoint, consumed checkpoints, ends of runs."""

    dv: int
    seq: int
    messages: list[tuple[str, int]]
    calls: list[tuple[str, Call]]
    node: str | None
    checkpoint: str | None
    gone: list[str]
    given_up: list[str]
    commits: list[tuple[str, int]]


def persist(w: World, ref: Ref, batch: Batch) -> str:
    """The commit: everything that was dirty, in one transaction under the fence."""
    s = w.sql
    if w.rules.persist_cas and not (holds(w, ref) if w.rules.sql_claim else s.sv <= ref.version):
        return "FENCED"
    if w.rules.persist_in_order and (batch.dv, batch.seq) < (s.sv, s.pseq):
        return "OLDER"
    w.note_persist(ref)
    if s.sv <= batch.dv or not w.rules.persist_cas:
        s.sv, s.pseq = batch.dv, batch.seq
    for message, version in batch.messages:
        s.messages.setdefault(message, version)
    for evidence, call in batch.calls:
        write_call(w, evidence, call)
    if batch.node is not None:
        s.node = batch.node
    if batch.checkpoint is not None:
        s.checkpoint = batch.checkpoint
    s.gone.update(batch.gone)
    if s.checkpoint in s.gone:
        s.checkpoint = ""
    end_runs(w, batch.given_up, "GIVEN_UP")
    end_runs(w, [run for run, _ in batch.commits], "DONE")
    for run, version in batch.commits:
        w.note_commit(run, version)
        s.commits.setdefault(run, version)
    return "DONE"


def end_runs(w: World, runs: Any, end: str) -> None:
    """Only a RUNNING run gets an end: the first one counts."""
    for run in runs:
        state, version = w.sql.runs.get(run, ("", 0))
        if state == "RUNNING":
            w.sql.runs[run] = (end, version)


def committed(w: World, run: str) -> bool:
    return run in w.sql.commits


__all__ = ["Unavailable"]
