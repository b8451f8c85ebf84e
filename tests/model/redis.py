"""Redis as the protocol sees it: the conversation's hot set, and the scripts, each one atomic step.

A state is never changed in place, so that any earlier one can come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

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
    if w.rules.flush_compare and w.rules.compare_first and (h.version != ref.version or h.owner != ref.run):
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
    stamps: bool = True,
    begins: bool = False,
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
    if begins and h.flush_seq and w.rules.begin_once:
        return "FENCED", h.seq
    if stamp is not None and w.rules.stamp_guard and stamp != (h.dv, h.seq if h.dv else 0):
        return "GAP", h.seq
    w.note_redis_write(ref)
    if sequence:
        w.note_flush(ref, sequence)
    new = h.copy()
    new.seq = max(h.seq, base) + 1
    if stamps:
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


def abandon(w: World, run: str) -> None:
    """abandon.lua: free the run's lock; while it owns the conversation, record its failed end."""
    h = w.hot
    new = h.copy()
    if h.lock is not None and h.lock[0] == run:
        new.lock = None
    if h.version and h.owner == run and not h.given_up:
        if not w.rules.abandon_unstamped:
            new.seq = h.seq + 1
        new.given_up = run
        new.append("run:" + run, h.version)
    w.store(new)
