"""The protocol model: random schedules of turns and faults, each decided by its seed alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.model.rules import CORRECT, Rules
from tests.model.turn import Plan
from tests.model.world import AFTER, BEFORE, Actor, World

STEPS = 150
TURNS = 6
TOGETHER = 3
ALL_FAULTS = frozenset({"crash", "expire", "redis", "sql", "answers", "late"})
OUTCOMES = ("ok", "ok", "ok", "reset-after", "reset-before", "refused", "late")


@dataclass
class Report:
    """What many schedules came to."""

    schedules: int = 0
    begun: int = 0
    acknowledged: int = 0
    effects: int = 0
    first: dict[str, tuple[int, str]] = field(default_factory=dict)  # invariant → seed, what

    def add(self, seed: int, w: World) -> None:
        self.schedules += 1
        self.begun += len(w.begun - {w.last})
        self.acknowledged += sum(1 for r, (end, _) in w.ends.items() if end == "PERSISTED" and r != w.last)
        self.effects += bool(w.effects)
        for number, what in w.violations.items():
            self.first.setdefault(number, (seed, what))


class Schedule:
    """One random history. ``log`` is None unless somebody wants to read it."""

    def __init__(self, rules: Rules, seed: int, faults: frozenset[str], log: list[str] | None) -> None:
        self.rnd = Random(seed)  # noqa: S311 - a schedule, no secret
        self.w = World(rules, self.rnd)
        self.faults = faults
        self.log = log
        self.sql_back = 0

    def note(self, what: str) -> None:
        if self.log is not None:
            self.log.append(what)

    def run(self, *, first_only: bool) -> World:
        w, uniform = self.w, self.rnd.random
        current: Actor | None = None
        left = 0
        for _ in range(STEPS):
            x = uniform()
            if x < 0.08:
                self.disturb(x / 0.08)
            if left == 0 or current not in w.actors:
                current = self.choose(uniform())
                left = 1 + int(uniform() * 12)
            left -= 1
            if current is not None:
                self.advance(current, uniform())
            w.check()
            if w.violations and first_only:
                return w
        self.note("quiescence, one fresh turn")
        w.settle_down()
        return w

    def choose(self, x: float) -> Actor | None:
        w = self.w
        if w.turns < TURNS and len(w.actors) < TOGETHER and (not w.actors or x < 0.3):
            return self.start()
        return w.actors[int(self.rnd.random() * len(w.actors))] if w.actors else None

    def start(self) -> Actor:
        x = self.rnd.random
        plan = Plan(
            writes=x() < 0.75,
            key="a" if x() < 0.6 else "b",
            outcome=OUTCOMES[int(x() * len(OUTCOMES))],
            leaves_node=x() < 0.2,
        )
        again = f"t{self.w.turns}.user" if self.w.turns and x() < 0.05 else ""
        actor = self.w.start(plan, again)
        self.note(f"{actor.run} starts: writes={plan.writes} key={plan.key} outcome={plan.outcome} {again}")
        return actor

    def advance(self, actor: Actor, x: float) -> None:
        w = self.w
        lose = 0
        if "answers" in self.faults:
            if x < 0.02:
                lose = BEFORE if x < 0.008 else AFTER
            elif x < 0.04 and actor.handler is not None:
                w.trip = BEFORE if x < 0.03 else AFTER
        place, trip, calls = actor.at or "begin", w.trip, actor.handler is None
        w.step(actor, lose=lose)
        w.trip = 0
        if self.log is not None and place != "call":
            lost = lose if calls and (actor.handler is not None or actor.at == "call.lost") else trip
            words = ("", ", lost on the way", ", answer lost")[lost]
            self.note(f"{actor.run}{'' if actor.turn is not None else ' (orphan)'} {place}{words}")

    def disturb(self, x: float) -> None:
        """One fault, or a call that lands."""
        w, faults = self.w, self.faults
        pick = self.rnd.random()
        if x < 0.08 and "crash" in faults and w.actors:
            actor = w.actors[int(pick * len(w.actors))]
            self.note(f"the harness of {actor.run} crashes")
            w.crash_harness(actor)
        elif x < 0.14 and "crash" in faults:
            self.note("the state service crashes")
            w.crash_state()
        elif x < 0.40 and "expire" in faults:
            run = sorted(w.leases)[int(pick * len(w.leases))] if w.leases and pick < 0.5 else ""
            self.note(f"the lease of {run or 'the holder'} expires")
            w.expire(run)
        elif x < 0.44 and "redis" in faults:
            self.note("Redis is wiped")
            w.wipe()
        elif x < 0.52 and "redis" in faults:
            dump = int(pick * len(w.dumps))
            self.note(f"Redis goes back {len(w.dumps) - 1 - dump} writes")
            w.roll_back(dump)
        elif x < 0.58 and "sql" in faults:
            self.note("SQL goes down")
            w.sql_down = True
        elif x < 0.75:
            if w.sql_down:
                self.note("SQL is back")
            w.sql_down = False
        elif x < 0.85 and "late" in faults and w.actors:
            actor = w.actors[int(pick * len(w.actors))]
            self.note(f"{actor.run} stops waiting for {actor.at}")
            w.time_out(actor)
        elif w.in_flight:
            self.note("a late call takes effect")
            w.land()


def run(
    seed: int,
    rules: Rules = CORRECT,
    faults: frozenset[str] = ALL_FAULTS,
    *,
    log: list[str] | None = None,
    first_only: bool = True,
) -> World:
    return Schedule(rules, seed, faults, log).run(first_only=first_only)


def campaign(
    seeds: range, rules: Rules = CORRECT, faults: frozenset[str] = ALL_FAULTS, *, stop: bool = True
) -> Report:
    """Many schedules; with ``stop`` only until the first that breaks a promise."""
    report = Report()
    for seed in seeds:
        report.add(seed, run(seed, rules, faults))
        if stop and report.first:
            break
    return report


def replay(seed: int, rules: Rules = CORRECT, faults: frozenset[str] = ALL_FAULTS) -> str:
    """The schedule of a seed in words, up to the step that breaks a promise, and what it breaks."""
    log: list[str] = []
    w = run(seed, rules, faults, log=log)
    lines = [f"{place:4d}  {what}" for place, what in enumerate(log, start=1)]
    lines += [f"{number} broken: {what}" for number, what in sorted(w.violations.items())]
    return "\n".join([f"seed {seed}", *lines])
