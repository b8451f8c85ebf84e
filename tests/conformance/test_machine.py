"""The real service, by the protocol's own invariants (reliability.md 5.2): Hypothesis chooses who goes on and
what fails. ``TURNFENCE_EXAMPLES`` and ``TURNFENCE_STEPS`` set how much; without them the choice is always the
same, so that a change that fails is the change's fault."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests import servers
from tests.conformance.bench import Bench, Loop, bench
from tests.conformance.player import Plan, Player
from tests.conformance.world import COMMIT, LOCKED, SCRIPT, RealWorld
from tests.proxy import Then

EXAMPLES = int(os.environ.get("TURNFENCE_EXAMPLES", "40"))
# Hypothesis throws half as many away again: this makes more than 60.
STEPS = int(os.environ.get("TURNFENCE_STEPS", "20"))
ACKNOWLEDGED = 0.3
# Shrinking takes minutes: it is for the one who looks for a cause, with TURNFENCE_SHRINK=1.
PHASES = [Phase.generate, *([Phase.shrink] if os.environ.get("TURNFENCE_SHRINK") == "1" else [])]
TURNS, TOGETHER = 6, 3

PLANS = st.builds(
    Plan,
    writes=st.sampled_from([True, True, True, False]),
    key=st.sampled_from(["a", "a", "b"]),
    outcome=st.sampled_from(["ok", "ok", "ok", "reset-after", "reset-before", "refused", "late"]),
    leaves_node=st.sampled_from([False, False, False, True]),
    closes=st.sampled_from([False, False, False, True]),
)
PLACES = st.sampled_from([("hot", SCRIPT), ("cold", LOCKED), ("cold", COMMIT)])
LOSSES = st.sampled_from([Then.CUT, Then.CUT_ANSWER])
WHO = st.integers(0, 11)
STEPS_AT_ONCE = st.integers(1, 12)
WHOLE = 40  # more than any turn takes
FAULTS = ["harness", "harness", "lease", "lease", "lease", "redis", "redis", "sql", "state"]


class Count:
    begun = acknowledged = examples = 0


class Machine(RuleBasedStateMachine):
    bench: ClassVar[Bench]
    loop: ClassVar[Loop]
    count: ClassVar[Count]

    def __init__(self) -> None:
        super().__init__()
        self.bench.redis.flushall()
        self.world = RealWorld(self.bench)

    # --- turns ---

    @precondition(lambda self: self.world.turns < TURNS and len(self.world.players) < TOGETHER)
    @rule(plan=PLANS, steps=STEPS_AT_ONCE)
    def start(self, plan: Plan, steps: int) -> None:
        self._goes_on(self.world.start(plan), steps)

    @precondition(lambda self: self.world.turns < TURNS and not self.world.players)
    @rule(plan=PLANS)
    def play(self, plan: Plan) -> None:
        """A whole turn that nothing disturbs."""
        self._goes_on(self.world.start(plan), WHOLE)

    def _goes_on(self, player: Player, steps: int) -> None:
        for _ in range(steps):
            if player in self.world.players:
                self.loop.run(self.world.advance(player))

    def _free(self, who: int) -> Player:
        free = [player for player in self.world.players if player.run not in self.world.held]
        return free[who % len(free)]

    def _some_are_free(self) -> bool:
        return len(self.world.players) > len(self.world.held)

    @precondition(_some_are_free)
    @rule(who=WHO, steps=STEPS_AT_ONCE)
    def go_on(self, who: int, steps: int) -> None:
        self._goes_on(self._free(who), steps)

    @precondition(_some_are_free)
    @rule(who=WHO)
    def end(self, who: int) -> None:
        self._goes_on(self._free(who), WHOLE)

    @precondition(_some_are_free)
    @rule(who=WHO, place=PLACES, then=LOSSES)
    def lose(self, who: int, place: tuple[str, bytes], then: Then) -> None:
        proxy = self._proxy(place[0])
        if proxy is not None:
            self.loop.run(self.world.advance_with_loss(self._free(who), proxy, place[1], then))

    @precondition(_some_are_free)
    @rule(who=WHO, place=PLACES)
    def hold(self, who: int, place: tuple[str, bytes]) -> None:
        proxy = self._proxy(place[0])
        if proxy is not None:
            self.loop.run(self.world.hold(self._free(who), proxy, place[1]))

    @precondition(lambda self: self.world.held)
    @rule(who=WHO)
    def release(self, who: int) -> None:
        held = [player for player in self.world.players if player.run in self.world.held]
        self.loop.run(self.world.release(held[who % len(held)]))

    def _proxy(self, store: str) -> Any:
        return self.bench.hot_proxy if store == "hot" else self.bench.cold_proxy

    # --- what goes wrong ---

    @precondition(lambda self: self.world.turns)
    @rule(kind=st.sampled_from(FAULTS), who=WHO)
    def disturb(self, kind: str, who: int) -> None:
        world = self.world
        match kind:
            case "harness" if self._some_are_free():
                world.crash_harness(self._free(who))
            case "state":
                self.loop.run(world.crash_state())
            case "lease":
                leases = sorted(world.leases)
                world.expire(leases[who % len(leases)] if leases and who % 2 else "")
            case "redis":  # loses its last writes, or all of them
                world.go_back(max(0, len(world.images) - 2 - who) if who else 0)
            case "sql" if self.bench.sql_is_down:
                self.loop.run(self.bench.mend())
            case "sql":
                self.loop.run(self.bench.sql_down())

    @precondition(lambda self: self.bench.sql_is_down)
    @rule()
    def sql_is_back(self) -> None:
        self.loop.run(self.bench.mend())

    @precondition(lambda self: self.world.late or self.world.in_flight)
    @rule()
    def land(self) -> None:
        self.loop.run(self.world.land())

    def teardown(self) -> None:
        world = self.world
        try:
            if not world.violations:
                self.loop.run(world.settle_down())
                self.count.examples += 1
                self.count.begun += len(world.begun) - 1
                self.count.acknowledged += sum(end == "PERSISTED" for end, _ in world.ends.values()) - 1
        finally:
            world.close()


# The embedded stores have their turn in the long run: SQL has no network there that could fail.
@pytest.fixture(params=["servers", "embedded"] if "TURNFENCE_EXAMPLES" in os.environ else ["servers"])
def machine(request: pytest.FixtureRequest) -> Iterator[type[Machine]]:
    database: servers.PrivateMariaDB | None = None
    if request.param == "servers":
        template: Path = request.getfixturevalue("mariadb_template")
        with servers.private_mariadb(template) as database:
            yield from _machine(database)
    else:
        yield from _machine(None)


def _machine(database: servers.PrivateMariaDB | None) -> Iterator[type[Machine]]:
    loop = Loop()
    try:
        with bench(loop, database) as made:
            yield type("Bound", (Machine,), {"bench": made, "loop": loop, "count": Count()})
    finally:
        loop.close()


@pytest.mark.timeout(3600)
@pytest.mark.servers
def test_the_service_keeps_what_the_protocol_promises(machine: type[Machine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize="TURNFENCE_EXAMPLES" not in os.environ,
            database=None,
            phases=PHASES,
        ),
    )
    count = machine.count
    print(f"{count.examples} examples, {count.begun} turns begun, {count.acknowledged} acknowledged")
    assert count.acknowledged >= ACKNOWLEDGED * count.begun
