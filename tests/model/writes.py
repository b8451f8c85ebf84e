"""The state service's S2 and S3: a write is registered in both stores, Redis first, before it is called."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.model import redis, sql
from tests.model.begin import ATTEMPTS, stamp_of
from tests.model.persist import Steps, current, refuse, written
from tests.model.redis import OPEN, Call, Hot, Ref
from tests.model.rules import Fenced, Lost, Unavailable

if TYPE_CHECKING:
    from tests.model.world import World


def register(w: World, ref: Ref, seen: int, evidence: str, key: str, consume: str) -> Steps:
    """S2: Redis first, SQL second. Answers (PROCEED or what bars it, sequence)."""
    yield "s2.hot"
    code, seq, found = w.redis(redis.register, ref, seen, evidence, key, consume)
    if code == "FOUND":
        return w.hot.calls[found].status if found in w.hot.calls else "UNKNOWN", seq
    if code not in ("APPLIED", "ALREADY"):
        raise refuse(code)
    if not w.rules.s2_sql:
        return "PROCEED", seq
    yield "s2.sql"
    kind, other = w.query(sql.register_call, ref, evidence, key)
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
    return known.status, written(w.redis(redis.apply, ref, take_back))


def settle_first(w: World, ref: Ref, evidence: str, key: str, other: str) -> Steps:
    """A write that bars ours in SQL but is settled in Redis is settled in SQL first."""
    yield "s2.look"
    known = w.redis(current).calls.get(other)
    if known is None or known.status in OPEN or w.sql.calls[other].status not in OPEN:
        return "DUPLICATE", other
    yield "s2.settle"
    if not w.query(sql.settle_call, ref, other, known):
        return "FENCED", ""
    yield "s2.sql"
    return w.query(sql.register_call, ref, evidence, key)


def settle(w: World, ref: Ref, seen: int, evidence: str, call: Call) -> Steps:
    """S3: the head in Redis, while its data is as it was read; then SQL. The first settlement counts."""
    for _ in range(ATTEMPTS):
        yield "s3.read"
        h: Hot = w.redis(current)
        if (h.version != ref.version or h.owner != ref.run) and w.rules.flush_compare:
            raise Fenced if h.version else Lost
        known = h.calls.get(evidence)
        if known is not None and known.status not in OPEN:
            call, seq = known, h.seq
            break
        yield "s3.hot"
        put = partial(Hot.put_call, evidence=evidence, call=call)
        code, seq = w.redis(redis.apply, ref, put, seen=seen, stamp=stamp_of(h))
        if code != "GAP":
            if code != "APPLIED":
                raise refuse(code)
            break
    else:
        raise Unavailable
    yield "s3.sql"
    if not w.query(sql.settle_call, ref, evidence, call):
        raise Fenced
    return seq
