"""The state service's handlers, one generator each: what is between two ``yield`` is one step.

The name that is yielded is the step that comes next, so a schedule can stop a handler before it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.model import stores
from tests.model.rules import Busy, Fenced, Known, Lost, Unavailable
from tests.model.stores import OPEN, Batch, Call, Change, Claim, Hot, Ref

if TYPE_CHECKING:
    from tests.model.world import World

Steps = Generator[str, None, Any]
ATTEMPTS = 4


class Begun(NamedTuple):
    ref: Ref
    seen: int
    calls: dict[str, Call]
    checkpoint: str
    node: str


def refuse(code: str) -> Exception:
    return Lost() if code in ("LOST", "MISSING") else Fenced()


def written(answer: tuple[str, int]) -> int:
    code, seq = answer
    if code not in ("APPLIED", "ALREADY"):
        raise refuse(code)
    return seq


# --- begin ----------------------------------------------------------------------------------------


def begin(w: World, run: str, message: str) -> Steps:
    """Lock and renew → claim → recover → the user's message in Redis → S1."""
    token = f"{run}/{w.fresh()}"
    ref, prev, claim, early = yield from take(w, run, token, message)
    w.note_begin(run, prev)
    for _ in range(ATTEMPTS):
        view, change = yield from recover(w, ref, claim, prev, early)

        def whole(h: Hot, change: Change = change) -> None:
            change(h)
            h.say(message, ref.version)

        yield "begin.flush"
        code, seq = w.redis(stores.apply, ref, whole, stamp=stamp_of(view), base=claim.pseq)
        if code != "GAP":
            break
    if code != "APPLIED":
        raise refuse(code)
    h = w.hot
    begun = Begun(ref, seq, h.calls, h.checkpoint, h.node)
    w.note_view(ref, h)
    yield "begin.s1"
    if not w.query(stores.insert_message, ref, message):
        raise Fenced
    return begun


def take(w: World, run: str, token: str, message: str) -> Steps:
    baseline: int | None = None
    early: Hot | None = None
    for _ in range(ATTEMPTS):
        if not w.rules.renew_first:
            yield "begin.early_load"
            early = w.redis(current)
        yield "begin.acquire"
        kind, ref, prev = w.redis(stores.acquire, run, token, baseline)
        if kind == "BUSY":
            raise Busy
        if kind == "UNKNOWN":
            yield "begin.baseline"
            baseline = w.query(lambda w: max(w.sql.fence, w.sql.sv))
            continue
        if not w.rules.stale_after_claim:
            yield "begin.early_check"
            sv, pseq = w.query(lambda w: (w.sql.sv, w.sql.pseq))
            early = w.redis(current)
            w.early_stale[run] = (early.dv, early.seq) < (sv, pseq)
        yield "begin.claim"
        try:
            claim = w.query(stores.claim, ref, message)
        except Unavailable:
            yield "begin.undo"
            w.redis(stores.undo, ref, prev)
            raise
        if claim.kind == "CLAIMED":
            return ref, prev, claim, early
        if claim.kind == "BEHIND":
            baseline = claim.fence
            continue
        yield "begin.undo"
        w.redis(stores.undo, ref, prev)
        raise Known
    raise Busy


def current(w: World) -> Hot:
    return w.hot


def stamp_of(h: Hot) -> tuple[int, int]:
    return (h.dv, h.seq if h.dv else 0)


def is_stale(w: World, ref: Ref, h: Hot, claim: Claim) -> bool:
    rules = w.rules
    if not rules.detect_stale:
        return False
    if not rules.stale_after_claim:
        return w.early_stale.get(ref.run, False)
    if not rules.data_stamp:  # by the version: renew has raised it already, so nothing ever looks old
        return not h.dv and claim.sv > 0
    if not rules.stamp_seq:
        return h.dv < claim.sv
    return stamp_of(h) < (claim.sv, claim.pseq)


def recover(w: World, ref: Ref, claim: Claim, prev: str, early: Hot | None) -> Steps:
    """Stale or lost data, an unfinished predecessor, what S1–S3 left in SQL, what is half done."""
    yield "begin.load"
    view = early if early is not None and not w.rules.renew_first else w.redis(current)
    if is_stale(w, ref, view, claim):
        yield "begin.rehydrate"
        rows = w.query(snapshot)
        yield "begin.restore"
        written(w.redis(stores.apply, ref, rows, stamp=stamp_of(view), base=claim.pseq))
        yield "begin.load"
        view = w.redis(current)
    finished: list[str] = []
    if view.dirty and w.rules.drain_at_begin:
        batch = yield from drain(w, ref, 0, closing=False)
        finished = [run for run, _ in batch.commits] + batch.given_up
        yield "begin.load"
        view = w.redis(current)
    unfinished = [run for run in claim.unfinished if run not in finished]
    if unfinished:
        yield "begin.end_runs"
        w.query(stores.end_runs, unfinished, "INTERRUPTED")
    return view, mend(w, ref, claim, prev)


def snapshot(w: World) -> Change:
    """Rehydration: everything of one consistent read; nothing of it is dirty."""
    messages, calls = dict(w.sql.messages), dict(w.sql.calls)
    node, checkpoint = w.sql.node, w.sql.checkpoint

    def restore(h: Hot) -> None:
        h.messages, h.calls, h.node, h.checkpoint = messages, calls, node, checkpoint
        h.dirty, h.outbox = {}, {}

    return restore


def mend(w: World, ref: Ref, claim: Claim, prev: str) -> Change:
    rules = w.rules

    def change(h: Hot) -> None:
        if rules.union:
            for message, version in claim.messages:
                if message not in h.messages:
                    h.messages = {**h.messages, message: version}
            for evidence, call in claim.calls:
                known = h.calls.get(evidence)
                if known is None or (known.status in OPEN and call.status not in OPEN):
                    h.put_call(evidence, call)
        if not rules.normalise_always and not prev:
            return
        for evidence, call in h.calls.items():
            if call.run != ref.run and call.status in ("STARTED", "PRE_CALL"):
                status = "UNKNOWN" if call.status == "STARTED" else "CANCELLED"
                h.put_call(evidence, call._replace(status=status))
        if h.node == "RUNNING":
            h.put_node("READY")

    return change


# --- flush, drain, persist ------------------------------------------------------------------------


def flush(w: World, ref: Ref, seen: int, sequence: int, change: Change) -> Steps:
    yield "flush.apply"
    return written(w.redis(stores.apply, ref, change, seen=seen, sequence=sequence))


def persist(w: World, ref: Ref, seen: int, sequence: int, change: Change) -> Steps:
    """Prepare → commit → close. Answers PERSISTED or PENDING."""

    def prepare(h: Hot) -> None:
        change(h)
        h.append("commit:" + ref.run, ref.version)

    yield "persist.prepare"
    try:
        seq = written(w.redis(stores.apply, ref, prepare, seen=seen, sequence=sequence, prepares=True))
        try:
            yield from drain(w, ref, seq, closing=True)
        except Unavailable:
            yield "persist.unlock"
            w.redis(unlock, ref)
            return "PENDING"
        return "PERSISTED"
    except Fenced:
        return (yield from fenced_end(w, ref))


def fenced_end(w: World, ref: Ref) -> Steps:
    """Fenced by its own end, or by a successor that has yet to bring it to SQL. The outbox is asked
    first: a member that is gone from it is in SQL, or was lost with Redis."""
    if w.rules.prepared_is_pending:
        yield "persist.outbox"
        if "commit:" + ref.run in w.redis(current).outbox:
            return "PENDING"
    if w.rules.commit_token:
        yield "persist.committed"
        if w.query(stores.committed, ref.run):
            return "PERSISTED"
    raise Fenced


def unlock(w: World, ref: Ref) -> None:
    h = w.hot
    if h.version == ref.version and h.owner == ref.run:
        new = h.copy()
        release(w, new, ref)
        w.store(new)


def release(w: World, h: Hot, ref: Ref) -> None:
    if h.lock == (ref.run, ref.token) or (h.lock is not None and not w.rules.unlock_compare):
        w.note_unlock(ref, h.lock)
        h.lock = None


def drain(w: World, ref: Ref, seen: int, *, closing: bool) -> Steps:
    """Read what is dirty, then its values, commit it, and clean up what has not changed since."""
    yield "drain.pending"
    pending: Hot = w.redis(current)
    if w.rules.flush_compare and (pending.version != ref.version or pending.owner != ref.run):
        raise Fenced if pending.version else Lost
    if w.rules.seen_seq and pending.seq < seen:
        raise Lost
    yield "drain.values"
    batch = batch_of(w, ref, pending, w.redis(current), closing=closing)
    yield from commit(w, ref, batch)

    def close(h: Hot) -> None:
        done = [
            member
            for member in pending.dirty
            if member in h.dirty and (h.dirty[member] <= pending.seq or not w.rules.clean_compare)
        ]
        h.dirty = {m: q for m, q in h.dirty.items() if m not in done}
        h.outbox = {m: q for m, q in h.outbox.items() if m not in done}
        if closing:
            h.owner = ""
            release(w, h, ref)

    yield "drain.close"
    try:
        w.redis(stores.apply, ref, close, seen=seen)
    except Unavailable:
        pass  # harmless: the marks stay, and the next begin does it again
    if closing and not w.rules.unlock_compare:
        w.redis(careless_unlock, ref)
    return batch


def careless_unlock(w: World, ref: Ref) -> None:
    new = w.hot.copy()
    release(w, new, ref)
    w.store(new)


def batch_of(w: World, ref: Ref, pending: Hot, values: Hot, *, closing: bool) -> Batch:
    members = pending.dirty
    if closing and not w.rules.persist_all:
        members = {m: q for m, q in members.items() if pending.outbox.get(m, ref.version) == ref.version}
    named = {"m": [], "c": [], "gone": [], "run": [], "commit": []}  # type: dict[str, list[str]]
    for member in members:
        kind, _, rest = member.partition(":")
        if rest:
            named[kind].append(rest)
    return Batch(
        pending.dv,
        pending.seq,
        [(m, pending.outbox["m:" + m]) for m in named["m"]],
        [(e, values.calls[e]) for e in named["c"] if e in values.calls],
        values.node if "node" in members else None,
        values.checkpoint if "checkpoint" in members else None,
        named["gone"],
        named["run"],
        [(run, pending.outbox["commit:" + run]) for run in named["commit"]],
    )


def commit(w: World, ref: Ref, batch: Batch) -> Steps:
    """One transaction; an unknown outcome is asked for, then tried once more."""
    for attempt in (1, 2):
        yield "drain.commit"
        try:
            if w.query(stores.persist, ref, batch) == "FENCED":
                raise Fenced
            return
        except Unavailable:
            if w.rules.commit_token and batch.commits:
                yield "drain.committed"
                if w.query(stores.committed, batch.commits[-1][0]):
                    return
            if attempt == 2:
                raise


def abandon(w: World, run: str) -> Steps:
    yield "abandon.hot"
    if w.redis(stores.abandon, run) == "PREPARED":
        return
    yield "abandon.sql"
    w.query(stores.end_runs, [run], "GIVEN_UP")


# --- S2 and S3 ------------------------------------------------------------------------------------


def register(w: World, ref: Ref, seen: int, evidence: str, key: str, consume: str) -> Steps:
    """S2: Redis first, SQL second. Answers (PROCEED or what bars it, sequence)."""
    yield "s2.hot"
    code, seq, found = w.redis(stores.register, ref, seen, evidence, key, consume)
    if code == "FOUND":
        return w.hot.calls[found].status if found in w.hot.calls else "UNKNOWN", seq
    if code not in ("APPLIED", "ALREADY"):
        raise refuse(code)
    if not w.rules.s2_sql:
        return "PROCEED", seq
    yield "s2.sql"
    kind, other = w.query(stores.register_call, ref, evidence, key)
    if kind == "DUPLICATE":
        kind, other = yield from settle_first(w, ref, evidence, key, other)
    if kind == "FENCED":
        raise Fenced
    mine = w.sql.calls[evidence] if kind == "MINE" else None
    if mine is not None and mine.status != "STARTED":
        return mine.status, seq
    if kind != "DUPLICATE":
        return "PROCEED", seq
    known = w.sql.calls[other]

    def take_back(h: Hot) -> None:
        h.put_call(evidence, Call(key, "CANCELLED", ref.run, ref.version))
        h.put_call(other, known)

    yield "s2.undo"
    return known.status, written(w.redis(stores.apply, ref, take_back))


def settle_first(w: World, ref: Ref, evidence: str, key: str, other: str) -> Steps:
    """A write that bars ours in SQL but is settled in Redis is settled in SQL first."""
    yield "s2.look"
    known = w.redis(current).calls.get(other)
    if known is None or known.status in OPEN or w.sql.calls[other].status not in OPEN:
        return "DUPLICATE", other
    yield "s2.settle"
    if not w.query(stores.settle_call, ref, other, known):
        return "FENCED", ""
    yield "s2.sql"
    return w.query(stores.register_call, ref, evidence, key)


def settle(w: World, ref: Ref, seen: int, evidence: str, call: Call) -> Steps:
    """S3: the head in Redis, while its data is as it was read; then SQL. The first settlement counts."""
    for _ in range(ATTEMPTS):
        yield "s3.read"
        h: Hot = w.redis(current)
        if h.version != ref.version or h.owner != ref.run:
            if w.rules.flush_compare:
                raise Fenced if h.version else Lost
        known = h.calls.get(evidence)
        if known is not None and known.status not in OPEN:
            call, seq = known, h.seq
            break
        yield "s3.hot"
        put: Callable[[Hot], None] = lambda h, call=call: h.put_call(evidence, call)  # noqa: E731
        code, seq = w.redis(stores.apply, ref, put, seen=seen, stamp=stamp_of(h))
        if code != "GAP":
            if code != "APPLIED":
                raise refuse(code)
            break
    else:
        raise Unavailable
    yield "s3.sql"
    if not w.query(stores.settle_call, ref, evidence, call):
        raise Fenced
    return seq
