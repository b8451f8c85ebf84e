"""Everything that moves: the stores, the processes, and whatever breaks. One seed is one history."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Concatenate, ParamSpec, TypeVar

from tests.model import turn as turns
from tests.model.invariants import Witness
from tests.model.persist import Steps
from tests.model.redis import Call, Hot
from tests.model.rules import REFUSED, Rules, Unavailable
from tests.model.sql import Sql
from tests.model.turn import GivenUp, Plan, Turn

P = ParamSpec("P")
T = TypeVar("T")

DUMPS = 24  # how many earlier states of Redis may come back
BEFORE, AFTER = 1, 2


class Actor:
    """A turn in a harness process, or a handler that has outlived its caller (``turn`` is None)."""

    __slots__ = ("answer", "at", "error", "handler", "lost", "run", "turn")

    def __init__(self, run: str, turn: Turn | None, handler: Steps | None = None) -> None:
        self.run = run
        self.turn = turn
        self.handler = handler
        self.answer: Any = None
        self.error: Exception | None = None
        self.lost = 0  # of the call that is out: BEFORE it arrives, or its answer AFTER
        self.at = ""


class World(Witness):
    def __init__(self, rules: Rules, rnd: Random) -> None:
        super().__init__(rules, Sql())
        self.rnd = rnd
        self.dumps = [self.hot]
        self.sql_down = False
        self.trip = 0  # of the next store operation
        self.leases: set[str] = set()  # runs whose holder may still think that it holds the lock
        self.in_flight: list[str] = []
        self.early_stale: dict[str, bool] = {}
        self.actors: list[Actor] = []
        self.turns = 0
        self.last = ""  # the run after the faults
        self.tokens = 0

    # --- what the protocol calls ------------------------------------------------------------------

    def redis(self, script: Callable[Concatenate[World, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        trip, self.trip = self.trip, 0
        if trip == BEFORE:
            raise Unavailable
        answer = script(self, *args, **kwargs)
        if trip:
            raise Unavailable
        return answer

    def query(self, transaction: Callable[Concatenate[World, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self.sql_down:
            raise Unavailable
        return self.redis(transaction, *args, **kwargs)

    def store(self, hot: Hot) -> None:
        """Every acknowledged write to Redis may later be lost."""
        self.hot = hot
        self.dumps.append(hot)
        if len(self.dumps) > 2 * DUMPS:
            del self.dumps[:DUMPS]

    def fresh(self) -> int:
        self.tokens += 1
        return self.tokens

    def deliver(self, run: str, evidence: str, plan: Plan, approval: str) -> str:
        """The tool is called; answers the status that the harness settles."""
        key, outcome = plan.key, plan.outcome
        self.note_delivery(run, evidence, key, approval)
        if outcome == "refused":
            self.verdicts[key] = self.verdicts.get(key, 0) + 1
            return "FAILED"
        if outcome == "late":
            self.in_flight.append(key)
        elif outcome != "reset-before":
            self.take_effect(key)
        return "SUCCESS" if outcome == "ok" else "UNKNOWN"

    def take_effect(self, key: str) -> None:
        if not (self.rules.tool_dedupes and self.effects.get(key)):
            self.note_effect(key)

    def verdict(self, call: Call) -> str:
        """The check tool's answer; '' while the holder may still call, or the call land."""
        if self.effects.get(call.key):
            return "SUCCESS"
        if self.rules.quarantine and (call.run in self.leases or call.key in self.in_flight):
            return ""
        self.verdicts[call.key] = self.verdicts.get(call.key, 0) + 1
        return "FAILED"

    # --- moves ------------------------------------------------------------------------------------

    def start(self, plan: Plan, message: str = "") -> Actor:
        self.turns += 1
        run = f"t{self.turns}"
        actor = Actor(run, turns.turn(self, run, message or f"{run}.user", plan))
        self.actors.append(actor)
        return actor

    def step(self, actor: Actor, *, lose: int = 0) -> bool:
        """One step of a turn or of its handler; False when the actor has ended."""
        handler, turn = actor.handler, actor.turn
        try:
            if handler is not None:
                actor.at = next(handler)
                return True
            assert turn is not None
            if actor.error is not None:
                error, actor.error = actor.error, None
                item = turn.throw(error)
            else:
                answer, actor.answer = actor.answer, None
                item = turn.send(answer)
            if isinstance(item, str):
                actor.at = item
            elif lose == BEFORE:
                actor.error, actor.at = Unavailable(), "call.lost"
            else:
                actor.handler, actor.lost, actor.at = item, lose, "call"
            return True
        except StopIteration as stop:
            return self._returned(actor, stop.value, None, handler)
        except (Unavailable, GivenUp, *REFUSED) as error:
            return self._returned(actor, None, error, handler)

    def _returned(self, actor: Actor, answer: Any, error: Exception | None, handler: Steps | None) -> bool:
        self.trip = 0
        actor.handler = None
        if handler is None or actor.turn is None:
            self._ended(actor)
            return False
        actor.answer, actor.error, actor.at = answer, error, "call.answer"
        if actor.lost:
            actor.answer, actor.error, actor.lost = None, Unavailable(), 0
        return True

    def until(self, actor: Actor, *places: str) -> str:
        """Run one actor alone until its next step is one of ``places``, or it has ended ('')."""
        while self.step(actor):
            self.check()
            if actor.at in places:
                return actor.at
        self.check()
        return ""

    def time_out(self, actor: Actor) -> Actor | None:
        """The caller stops waiting; its handler goes on alone."""
        if actor.handler is None or actor.turn is None:
            return None
        orphan = Actor(actor.run, None, actor.handler)
        orphan.at = actor.at
        actor.handler, actor.error, actor.lost = None, Unavailable(), 0
        self.actors.append(orphan)
        return orphan

    def crash_harness(self, actor: Actor) -> None:
        """Its handler does not notice."""
        if actor.turn is None:
            return
        actor.turn.close()
        actor.turn = None
        if actor.handler is None:
            self._ended(actor)

    def _ended(self, actor: Actor) -> None:
        """A directed schedule may go on with an actor that has ended already, as a mutant makes it."""
        if actor in self.actors:
            self.actors.remove(actor)

    def crash_state(self) -> None:
        """Every handler is gone; the harnesses see no answer."""
        for actor in list(self.actors):
            if actor.handler is None:
                continue
            actor.handler, actor.lost = None, 0
            actor.error = Unavailable()
            if actor.turn is None:
                self._ended(actor)

    def expire(self, run: str = "") -> None:
        """Time passes for a holder: its lock is gone, and it knows."""
        holder = run or (self.hot.lock[0] if self.hot.lock else "")
        self.leases.discard(holder)
        if self.hot.lock is not None and self.hot.lock[0] == holder:
            new = self.hot.copy()
            new.lock = None
            self.store(new)

    def roll_back(self, dump: int) -> None:
        self.losses += 1
        self.hot = self.dumps[dump]
        self.dumps = self.dumps[: dump + 1] if dump >= 0 else self.dumps[: len(self.dumps) + dump + 1]

    def wipe(self) -> None:
        self.losses += 1
        self.hot = Hot()
        self.dumps = [self.hot]

    def land(self) -> None:
        """A call that was under way takes effect."""
        if self.in_flight:
            self.take_effect(self.in_flight.pop(0))

    def settle_down(self) -> None:
        """All faults end, every process restarts; then one fresh turn, and the final checks."""
        self.sql_down, self.trip = False, 0
        self.actors.clear()
        while self.in_flight:
            self.land()
        for run in list(self.leases):
            self.expire(run)
        self.expire()
        last = self.start(Plan())
        self.last = last.run
        self.until(last)
        self.check_quiet(last.run)
