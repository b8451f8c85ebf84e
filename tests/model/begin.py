"""The state service's BeginTurn: lock and renew → claim → recover → the user's message."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.model import redis, sql
from tests.model.persist import Steps, current, drain, refuse, written
from tests.model.redis import OPEN, Call, Change, Hot, Ref
from tests.model.rules import Busy, Fenced, Known, Unavailable
from tests.model.sql import Claim

if TYPE_CHECKING:
    from tests.model.world import World

Stamp = tuple[int, int]
ATTEMPTS = 4


class Begun(NamedTuple):
    ref: Ref
    seen: int
    calls: dict[str, Call]
    checkpoint: str
    node: str
    lacks: str  # of what SQL had; the witness' word, which nobody acts on


def begin(w: World, run: str, message: str) -> Steps:
    """Lock and renew → claim → recover → the user's message in Redis → S1."""
    token = f"{run}/{w.fresh()}"
    ref, prev, claim, early = yield from take(w, run, token, message)
    w.note_begin(run, prev)
    floor = (claim.sv, claim.pseq)
    for _ in range(ATTEMPTS):
        view, change, floor = yield from recover(w, ref, claim, prev, early, floor)
        if view is None:
            code = "LOST"
            continue

        def whole(h: Hot, change: Change = change, view: Hot = view) -> None:
            if not w.rules.renew_first:  # the older view replaces what was written since
                h.messages, h.calls, h.node, h.checkpoint = (
                    view.messages,
                    view.calls,
                    view.node,
                    view.checkpoint,
                )
            change(h)
            h.say(message, ref.version)

        yield "begin.flush"
        code, seq = w.redis(redis.apply, ref, whole, stamp=stamp_of(view), base=claim.pseq, begins=True)
        if code != "GAP":
            break
    if code != "APPLIED":
        raise refuse(code)
    h = w.hot
    begun = Begun(ref, seq, h.calls, h.checkpoint, h.node, w.note_view(ref, h))
    yield "begin.s1"
    if not w.query(sql.insert_message, ref, message):
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
        kind, ref, prev = w.redis(redis.acquire, run, token, baseline)
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
            claim = w.query(sql.claim, ref, message)
        except Unavailable:
            yield "begin.undo"
            w.redis(redis.undo, ref, prev)
            raise
        if claim.kind == "CLAIMED":
            return ref, prev, claim, early
        if claim.kind == "BEHIND":
            baseline = claim.fence
            continue
        yield "begin.undo"
        w.redis(redis.undo, ref, prev)
        raise Known
    raise Busy


def stamp_of(h: Hot) -> tuple[int, int]:
    return (h.dv, h.seq if h.dv else 0)


def is_stale(w: World, ref: Ref, h: Hot, floor: Stamp) -> bool:
    """Older than what SQL is known to have."""
    rules = w.rules
    if not rules.detect_stale:
        return False
    if not rules.stale_after_claim:
        return w.early_stale.get(ref.run, False)
    if not rules.data_stamp:  # by the version: renew has raised it already, so nothing ever looks old
        return not h.dv and floor[0] > 0
    if not rules.stamp_seq:
        return h.dv < floor[0]
    return stamp_of(h) < floor


def recover(w: World, ref: Ref, claim: Claim, prev: str, early: Hot | None, floor: Stamp) -> Steps:
    """Stale or lost data, an unfinished predecessor, what S1–S3 left in SQL, what is half done.
    ``floor``: what SQL is known to have; the turn starts from no less."""
    yield "begin.load"
    view = early if early is not None and not w.rules.renew_first else w.redis(current)
    if is_stale(w, ref, view, floor):
        yield "begin.rehydrate"
        rows = w.query(snapshot)
        yield "begin.restore"
        written(w.redis(redis.apply, ref, rows, stamp=stamp_of(view), base=claim.pseq, begins=True))
        yield "begin.load"
        view = w.redis(current)
    finished: list[str] = []
    if view.dirty and w.rules.drain_at_begin:
        batch = yield from drain(w, ref, 0, closing=False)
        finished = [run for run, _ in batch.commits] + batch.given_up
        floor = max(floor, (batch.dv, batch.seq))
        yield "begin.load"
        view = w.redis(current)
    if w.rules.stale_rechecked and is_stale(w, ref, view, floor):
        return None, None, floor
    unfinished = [run for run in claim.unfinished if run not in finished]
    if unfinished:
        yield "begin.end_runs"
        if not w.query(sql.interrupt, ref, unfinished):
            raise Fenced
    calls = claim.calls
    opened = [evidence for evidence, call in view.calls.items() if call.status in OPEN]
    if opened and w.rules.union and w.rules.open_calls:
        yield "begin.calls"
        calls += w.query(sql.calls_of, opened)
    return view, mend(w, ref, claim.messages, calls, prev), floor


def snapshot(w: World) -> Change:
    """Rehydration: everything of one consistent read; nothing of it is dirty."""
    messages, calls = dict(w.sql.messages), dict(w.sql.calls)
    node, checkpoint = w.sql.node, w.sql.checkpoint

    def restore(h: Hot) -> None:
        h.messages, h.calls, h.node, h.checkpoint = messages, calls, node, checkpoint
        h.dirty, h.outbox = {}, {}

    return restore


Rows = tuple[tuple[str, Call], ...]


def mend(w: World, ref: Ref, messages: tuple[tuple[str, int], ...], calls: Rows, prev: str) -> Change:
    """What a turn that did not finish left open, put right; doing it twice changes nothing."""
    rules = w.rules

    def change(h: Hot) -> None:
        if rules.union:
            for message, version in messages:
                if message not in h.messages:
                    h.messages = {**h.messages, message: version}
            for evidence, call in calls:
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
