"""The state service's Flush, PersistTurn and AbandonTurn, one generator each: what is between two
``yield`` is one step, named before it is taken, so that a schedule can stop there.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.model import redis, sql
from tests.model.redis import Change, Hot, Ref
from tests.model.rules import Fenced, Lost, Unavailable
from tests.model.sql import Batch

if TYPE_CHECKING:
    from tests.model.world import World

Steps = Generator[str, None, Any]


def refuse(code: str) -> Exception:
    return Lost() if code in ("LOST", "MISSING") else Fenced()


def written(answer: tuple[str, int]) -> int:
    code, seq = answer
    if code not in ("APPLIED", "ALREADY"):
        raise refuse(code)
    return seq


def current(w: World) -> Hot:
    return w.hot


def flush(w: World, ref: Ref, seen: int, sequence: int, change: Change) -> Steps:
    yield "flush.apply"
    return written(w.redis(redis.apply, ref, change, seen=seen, sequence=sequence))


def persist(w: World, ref: Ref, seen: int, sequence: int, change: Change) -> Steps:
    """Prepare → commit → close. Answers PERSISTED or PENDING."""

    def prepare(h: Hot) -> None:
        change(h)
        h.append("commit:" + ref.run, ref.version)

    yield "persist.prepare"
    try:
        seq = written(w.redis(redis.apply, ref, prepare, seen=seen, sequence=sequence))
        try:
            yield from drain(w, ref, seq, closing=True)
        except Unavailable:
            yield "persist.unlock"
            w.redis(unlock, ref)
            return "PENDING"
        return "PERSISTED"
    except (Fenced, Lost) as error:
        return (yield from barred_end(w, ref, error))


def barred_end(w: World, ref: Ref, error: Exception) -> Steps:
    """Fenced by its own end, or by a successor that has yet to bring it to SQL. The outbox is asked
    first: a member that is gone from it is in SQL, or was lost with Redis."""
    prepared = False
    if w.rules.prepared_is_pending:
        yield "persist.outbox"
        prepared = "commit:" + ref.run in w.redis(current).outbox
    if w.rules.commit_token:
        yield "persist.committed"
        try:
            if w.query(sql.committed, ref.run):
                return "PERSISTED"
        except Unavailable:
            if not prepared:
                raise
    if prepared:
        return "PENDING"
    raise error


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
    if closing and w.rules.own_end_checked and "commit:" + ref.run not in pending.outbox:
        raise Lost
    yield "drain.values"
    values: Hot = w.redis(current)
    if w.rules.values_checked and (values.version, values.owner) != (ref.version, ref.run):
        raise Fenced
    if w.rules.values_checked and values.seq < pending.seq:
        raise Lost
    batch = batch_of(pending, values)
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
        told = max(seen, pending.seq)  # what is cleaned is not older than what was committed
        w.redis(redis.apply, ref, close, seen=told, stamps=closing or not w.rules.close_unstamped)
    except Unavailable:
        pass  # harmless: the marks stay, and the next begin does it again
    if closing and not w.rules.unlock_compare:
        w.redis(careless_unlock, ref)
    return batch


def careless_unlock(w: World, ref: Ref) -> None:
    new = w.hot.copy()
    release(w, new, ref)
    w.store(new)


def batch_of(pending: Hot, values: Hot) -> Batch:
    members = pending.dirty
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
    """One transaction, idempotent: when its outcome is unknown it is simply tried once more."""
    for attempt in (1, 2):
        yield "drain.commit"
        try:
            done = w.query(sql.persist, ref, batch)
            if done == "OLDER":
                raise Lost
            if done != "DONE":
                raise Fenced
            return
        except Unavailable:
            if not w.rules.commit_retried and batch.commits:
                yield "drain.committed"
                if w.query(sql.committed, batch.commits[-1][0]):
                    return
            if attempt == 2:
                raise


def abandon(w: World, run: str) -> Steps:
    yield "abandon.hot"
    w.redis(redis.abandon, run)
    yield "abandon.sql"
    w.query(sql.end_runs, [run], "GIVEN_UP")
