"""SQL as the protocol sees it: the conversation's rows, and the transactions, each one atomic step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from tests.model.redis import OPEN, Call, Ref, bars

if TYPE_CHECKING:
    from tests.model.world import World


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


class Claim(NamedTuple):
    kind: str
    fence: int
    sv: int = 0
    pseq: int = 0
    messages: tuple[tuple[str, int], ...] = ()
    calls: tuple[tuple[str, Call], ...] = ()
    unfinished: tuple[str, ...] = ()


def holds(w: World, ref: Ref) -> bool:
    if not w.rules.sql_claim:
        return True
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


def calls_of(w: World, wanted: list[str]) -> tuple[tuple[str, Call], ...]:
    return tuple((e, w.sql.calls[e]) for e in wanted if e in w.sql.calls)


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
    w.note_sql_write(ref)
    w.note_registration(ref, key)
    s.calls[evidence] = Call(key, "STARTED", ref.run, ref.version)
    return "INSERTED", evidence


def write_call(w: World, evidence: str, call: Call) -> None:
    """UPDATE by id, else INSERT; what is settled is never made unsettled."""
    known = w.sql.calls.get(evidence)
    if w.rules.settled_wins and known is not None and call.status in OPEN and known.status not in OPEN:
        return
    w.note_call(evidence, known, call)
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
        if w.rules.first_end_counts and s.runs[run][0] != "DONE":
            continue
        w.note_commit(run, version)
        s.commits.setdefault(run, version)
    return "DONE" if any(run == ref.run for run, _ in batch.commits) <= (ref.run in s.commits) else "ENDED"


def interrupt(w: World, ref: Ref, runs: list[str]) -> bool:
    """The end of runs that left none; of those alone that have not begun again since."""
    if w.rules.ends_fenced and not holds(w, ref):
        return False
    w.note_interrupt(ref, runs)
    end_runs(w, runs, "INTERRUPTED")
    return True


def end_runs(w: World, runs: Iterable[str], end: str) -> None:
    """Only a RUNNING run gets an end: the first one counts."""
    for run in runs:
        state, version = w.sql.runs.get(run, ("", 0))
        if state == "RUNNING":
            w.sql.runs[run] = (end, version)


def committed(w: World, run: str) -> bool:
    return run in w.sql.commits
