"""One turn in the harness: begin, verify what is in doubt, perhaps one write, persist.

It yields the name of its next step, or a handler to call; what it is not told it sends again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from tests.model import begin, persist, writes
from tests.model.redis import Call, Hot, Ref
from tests.model.rules import REFUSED, Busy, Fenced, Known, Lost, Unavailable

if TYPE_CHECKING:
    from tests.model.world import World

Item = str | persist.Steps
Turn = Generator[Item, Any, None]
SENDS = 5


class GivenUp(Exception):
    """No answer while the lease lasted."""


class Plan:
    """What the turn will do; drawn once, so that a directed schedule can set it."""

    __slots__ = ("key", "leaves_node", "outcome", "writes")

    def __init__(
        self, *, writes: bool = False, key: str = "a", outcome: str = "ok", leaves_node: bool = False
    ) -> None:
        self.writes = writes
        self.key = key  # "b" needs an approval
        self.outcome = outcome
        self.leaves_node = leaves_node  # it ends cleanly with its node RUNNING


class Scope:
    """The turn's memory in the harness: its reference, and the largest sequence it was told."""

    def __init__(self, w: World, run: str, message: str, plan: Plan) -> None:
        self.w, self.run, self.message, self.plan = w, run, message, plan
        self.ref = Ref(run, 0, "")
        self.seen = self.sequence = self.calls = 0
        self.view: dict[str, Call] = {}
        self.checkpoint = ""
        self.losses = w.losses  # of Redis, before this turn

    def send(self, make: Callable[[], persist.Steps]) -> Generator[Item, Any, Any]:
        """One call, repeated under its identity while there is no answer and the lease lasts."""
        for _ in range(SENDS):
            try:
                return (yield make())
            except Unavailable:
                if self.ref.version and self.run not in self.w.leases:
                    break
        raise GivenUp

    def saw(self, seq: int) -> None:
        self.seen = max(self.seen, seq)

    def flush(self, change: Callable[[Hot], None]) -> Generator[Item, Any, None]:
        self.sequence += 1
        number, seen = self.sequence, self.seen
        self.saw((yield from self.send(lambda: persist.flush(self.w, self.ref, seen, number, change))))

    def settle(self, evidence: str, call: Call) -> Generator[Item, Any, None]:
        seen = self.seen
        self.saw((yield from self.send(lambda: writes.settle(self.w, self.ref, seen, evidence, call))))
        self.view = {**self.view, evidence: call}


def turn(w: World, run: str, message: str, plan: Plan) -> Turn:
    scope = Scope(w, run, message, plan)
    try:
        yield from play(scope)
    except GivenUp:
        w.note_end(run, "UNKNOWN")
        yield from give_up(scope)
    except (Fenced, Lost) as error:
        w.note_end(run, "FENCED" if isinstance(error, Fenced) else "LOST", scope.losses)
        if isinstance(error, Lost):
            yield from give_up(scope)
    except (Busy, Known):
        w.note_end(run, "REFUSED")


def give_up(scope: Scope) -> Generator[Item, Any, None]:
    try:
        yield persist.abandon(scope.w, scope.run)
    except (Unavailable, *REFUSED):
        pass  # best effort: the next begin ends it


def play(scope: Scope) -> Generator[Item, Any, None]:
    w, plan = scope.w, scope.plan
    begun = yield from scope.send(lambda: begin.begin(w, scope.run, scope.message))
    scope.ref, scope.seen, scope.view, scope.checkpoint = begun.ref, begun.seen, begun.calls, begun.checkpoint
    w.note_begun(scope.run, begun.lacks)
    ref = scope.ref

    def start(h: Hot) -> None:
        h.put_node("RUNNING")
        h.say(scope.run + ".progress", ref.version)

    yield from scope.flush(start)
    w.note_told(scope.run + ".progress", scope.losses)
    yield from verify(scope)
    asks = ""
    if plan.writes:
        asks = yield from write(scope)

    node = w.nodes[scope.run] = "RUNNING" if plan.leaves_node else "DONE"

    def end(h: Hot) -> None:
        h.say(scope.run + ".reply", ref.version)
        h.put_node(node)
        if asks:
            h.put_checkpoint(asks)

    scope.sequence += 1
    yield "turn.persist"
    answer = yield from scope.send(lambda: persist.persist(w, ref, scope.seen, scope.sequence, end))
    w.note_end(scope.run, answer, scope.losses)
    w.note_told(scope.run + ".reply", scope.losses)


def verify(scope: Scope) -> Generator[Item, Any, None]:
    """Settle writes of unknown outcome, as far as the tool can tell."""
    for evidence, call in sorted(scope.view.items()):
        if call.status != "UNKNOWN":
            continue
        yield "turn.verify"
        verdict = scope.w.verdict(call)
        if verdict:
            yield from scope.settle(evidence, call._replace(status=verdict))


def write(scope: Scope) -> Generator[Item, Any, str]:
    """S2 → lease check → the call → S3. Answers the approval to ask for, or ''."""
    w, plan, ref = scope.w, scope.plan, scope.ref
    known = {call.status for call in scope.view.values() if call.key == plan.key}
    if "SUCCESS" in known or (("UNKNOWN" in known or "STARTED" in known) and w.rules.unknown_blocks):
        return ""
    consume = ""
    if plan.key == "b":
        if not scope.checkpoint:
            return "ask:" + scope.run
        consume = scope.checkpoint
    scope.calls += 1
    evidence = f"{scope.run}.{scope.calls}"
    seen = scope.seen
    call = Call(plan.key, "STARTED", scope.run, ref.version)
    try:
        decision, seq = yield from scope.send(
            lambda: writes.register(w, ref, seen, evidence, plan.key, consume)
        )
    except GivenUp:
        yield from scope.settle(evidence, call._replace(status="PRE_CALL"))
        raise
    scope.saw(seq)
    if decision != "PROCEED":
        return ""
    yield "turn.call"
    if w.rules.lease_check and scope.run not in w.leases:
        yield from scope.settle(evidence, call._replace(status="CANCELLED"))
        raise GivenUp
    if w.rules.pause_before_call:
        yield "turn.called"
    status = w.deliver(scope.run, evidence, plan, consume)
    yield "turn.settle"
    yield from scope.settle(evidence, call._replace(status=status))
    return ""
