"""The real service and its real stores under faults, watched by the witness of the protocol's model.

Calls are made one at a time, or are held at a store; so whatever changes was changed by the call that ran.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from state_service.ports import Scope
from tests.conformance.bench import Bench
from tests.conformance.player import Call, Plan, Player
from tests.conformance.projection import ColdReader, HotReader, model_id
from tests.contract.turns import StateClient, Talk, new_id
from tests.model.invariants import Witness
from tests.model.redis import BARS, OPEN, Hot
from tests.model.rules import CORRECT
from tests.model.sql import Sql
from tests.proxy import Proxy, Rule, Then
from turnfence import records as r
from turnfence.axes import CallStatus
from turnfence.errors import Reason, TurnfenceError

# A tool that ignores its idempotency key: what is done twice is seen twice.
RULES = replace(CORRECT, tool_dedupes=False)
DUMPS = 24  # how many earlier states of Redis may come back
SCRIPT, LOCKED, COMMIT = b"EVALSHA", b"FOR UPDATE", b"COMMIT"


@dataclass
class Held:
    """Bytes of a call that wait at a store. ``task`` is None when the service died meanwhile."""

    rule: Rule
    proxy: Proxy
    ref: r.TurnRef | None
    task: asyncio.Task[Any] | None


async def _made(call: Call) -> Any:
    return await call()


class RealWorld(Witness):
    def __init__(self, bench: Bench) -> None:
        super().__init__(RULES, Sql())
        self.bench = bench
        self.talk = Talk(bench.client)
        scope = Scope(self.talk.organ_id, self.talk.conversation_id)
        self.reader = HotReader(bench.redis, scope)
        self.rows = ColdReader(bench.sql_url, scope)
        self.tasks: dict[str, str] = {}  # evidence → task
        self.players: list[Player] = []
        self.held: dict[str, Held] = {}  # by run
        self.late: list[Held] = []
        self.leases: set[str] = set()  # runs whose holder may still think that it holds the lock
        self.in_flight: list[str] = []
        self.images: list[dict[bytes, bytes]] = [{}]
        self.turns = 0

    @property
    def client(self) -> StateClient:
        return self.bench.client

    # --- moves -------------------------------------------------------------------------------------

    def start(self, plan: Plan) -> Player:
        self.turns += 1
        player = Player(self, new_id(), plan)
        self.players.append(player)
        player.call = next(player.script)
        return player

    async def advance(self, player: Player) -> None:
        """The call that it is about to make, and what it makes of the answer."""
        if player.call is None:
            self.resume(player, None, None)
        else:
            await self.finish(player, player.call)

    async def finish(self, player: Player, call: Call) -> None:
        answer, error = None, None
        try:
            answer = await call()
        except TurnfenceError as caught:
            error = caught
        self.observe(player.turn.ref if player.turn is not None else None)
        self.resume(player, answer, error)

    def resume(self, player: Player, answer: Any, error: TurnfenceError | None) -> None:
        try:
            player.call = player.script.throw(error) if error is not None else player.script.send(answer)
        except StopIteration:
            self.players.remove(player)

    async def advance_with_loss(self, player: Player, proxy: Proxy, pattern: bytes, then: Then) -> None:
        """One store operation of the call never arrives, or its answer is lost."""
        rule = proxy.when(pattern, then)
        await self.advance(player)
        proxy.rules.remove(rule)

    async def hold(self, player: Player, proxy: Proxy, pattern: bytes) -> None:
        """Make the call, and keep one of its store operations on the way."""
        if player.call is None:
            await self.advance(player)
            return
        rule = proxy.when(pattern, Then.HOLD)
        task = asyncio.create_task(_made(player.call))
        met = asyncio.create_task(rule.met.wait())
        await asyncio.wait({task, met}, return_when=asyncio.FIRST_COMPLETED)
        met.cancel()
        ref = player.turn.ref if player.turn is not None else None
        self.held[player.run] = Held(rule, proxy, ref, task)
        if task.done():
            await self.release(player)

    async def release(self, player: Player) -> None:
        held = self.held.pop(player.run)
        held.rule.release()
        held.proxy.rules.remove(held.rule)

        async def answered() -> Any:
            assert held.task is not None
            return await held.task

        await self.finish(player, answered)

    async def land(self) -> None:
        """What a service that died had on the way arrives; and so does a call of a tool."""
        if self.late:
            held = self.late.pop(0)
            await held.rule.land()
            held.proxy.rules.remove(held.rule)
            self.observe(held.ref)
        elif self.in_flight:
            self.note_effect(self.in_flight.pop(0))

    def crash_harness(self, player: Player) -> None:
        if player.run not in self.held:  # else it is the service that still works for it
            player.script.close()
            self.players.remove(player)

    async def crash_state(self) -> None:
        """Its calls end without an answer; what they had sent is still on the way."""
        await self.bench.crash()
        for player in list(self.players):
            held = self.held.pop(player.run, None)
            if held is None or held.task is None:
                continue
            await asyncio.wait({held.task})
            self.late.append(replace(held, task=None))
            self.resume(player, None, TurnfenceError(Reason.STATE_UNAVAILABLE))
            held.task.exception()

    def expire(self, run: str = "") -> None:
        """Time passes for a holder: its lock is gone, and it knows."""
        lock = self.reader.read().lock
        holder = run or (lock[0] if lock else "")
        self.leases.discard(holder)
        if lock is not None and lock[0] == holder:
            self.reader.drop_lock()
        self.hot = self.reader.read()

    def go_back(self, image: int) -> None:
        """Redis as it was after an earlier write; 0: as if it were new."""
        self.losses += 1
        self.reader.restore(self.images[image])
        self.hot = self.reader.read()

    # --- what the tool does --------------------------------------------------------------------------

    def _operation(self, head: r.EvidenceHead) -> str:
        return f"{head.idempotency_key[:8]} of {head.task_id}"

    def call_tool(self, run: str, head: r.EvidenceHead, outcome: str, approval: str) -> CallStatus:
        operation = self._operation(head)
        self.note_delivery(run, model_id(head.evidence_id), operation, approval)
        if outcome == "refused":
            self.verdicts[operation] = self.verdicts.get(operation, 0) + 1
            return CallStatus.FAILED
        if outcome == "late":
            self.in_flight.append(operation)
        elif outcome != "reset-before":
            self.note_effect(operation)
        return CallStatus.SUCCESS if outcome == "ok" else CallStatus.UNKNOWN

    def verdict_on(self, head: r.EvidenceHead) -> CallStatus | None:
        """The check tool's answer; None while the holder may still call, or the call land."""
        operation = self._operation(head)
        if self.effects.get(operation):
            return CallStatus.SUCCESS
        if head.trace_id in self.leases or operation in self.in_flight:
            return None
        self.verdicts[operation] = self.verdicts.get(operation, 0) + 1
        return CallStatus.FAILED

    # --- what the witness sees -------------------------------------------------------------------------

    def observe(self, ref: r.TurnRef | None) -> None:
        """Both stores after a call of the turn ``ref`` (None: it has not begun)."""
        hot, (sql, tasks) = self.reader.read(), self.rows.read()
        if ref is not None:
            self._see_writes(ref, hot, sql)
        for evidence, call in sql.calls.items():
            known = self.sql.calls.get(evidence)
            self.note_call(evidence, known, call)
            if known is None and call.status == "STARTED":
                self._see_registration(evidence, call.key, tasks)
        committed = sql.commits.keys() - self.sql.commits.keys()
        changed = (hot.dv, hot.seq, hot.version) != (self.hot.dv, self.hot.seq, self.hot.version)
        self.hot, self.sql, self.tasks = hot, sql, tasks
        self.top = max(self.top, sql.fence)
        for run in committed:
            self.note_commit(run, sql.commits[run])
        if changed:
            self.images = [*self.images, self.reader.image()][-DUMPS:]
        self.check()
        self.complain()

    def _see_writes(self, ref: r.TurnRef, hot: Hot, sql: Sql) -> None:
        before = self.hot
        if (hot.dv, hot.seq) != (before.dv, before.seq):
            if ref.version < self.top:
                self.laundered = True
            if (before.version, before.owner) != (ref.version, ref.run_id):
                self.broken("I2r", f"{ref.run_id} wrote Redis at {ref.version}, not {before.version}")
        if _written(sql) != _written(self.sql) and ref.version < self.sql.fence:
            self.broken("I2s", f"{ref.run_id} wrote SQL at {ref.version} after {self.sql.fence} had claimed")

    def _see_registration(self, evidence: str, key: str, tasks: dict[str, str]) -> None:
        for other, call in self.sql.calls.items():
            same = call.key == key and self.tasks[other] == tasks[evidence]
            if same and call.status in BARS:
                self.broken("I15", f"{evidence} is registered beside {other}, which is {call.status}")

    def look_at_the_view(self, run: str) -> None:
        """What the turn that has just begun starts from."""
        h, lacks = self.hot, ""
        for message in self.sql.messages:
            if message not in h.messages:
                lacks = message
        for evidence in self._held_together(self.sql):
            call, known = self.sql.calls[evidence], h.calls.get(evidence)
            if known is None or (known.status in OPEN and call.status not in OPEN):
                lacks = evidence
        if h.checkpoint in self.sql.gone:
            lacks = h.checkpoint
        for evidence, call in h.calls.items():
            if call.status == "STARTED" and call.run != run:
                self.broken("I7", f"{evidence} is still STARTED after {run} began")
        if h.node == "RUNNING":
            self.broken("I7", f"the node is still RUNNING after {run} began")
        self.note_begun(run, lacks)

    def _held_together(self, s: Sql) -> list[str]:
        """Calls that both stores hold: of the active task, and open ones of any."""
        active = self.reader.active_task()
        return [e for e, call in s.calls.items() if call.status in OPEN or self.tasks[e] == active]

    def complain(self) -> None:
        for number, what in self.violations.items():
            raise AssertionError(f"{number} broken: {what}")

    # --- the end ---------------------------------------------------------------------------------------

    async def settle_down(self) -> None:
        """All faults end; then one fresh turn, and the final checks."""
        await self.bench.mend()
        for player in list(self.players):
            if player.run in self.held:
                await self.release(player)
        self.players.clear()
        while self.late or self.in_flight:
            await self.land()
        for run in list(self.leases):
            self.expire(run)
        self.expire()
        last = self.start(Plan())
        while last in self.players:
            await self.advance(last)
        self.check_quiet(last.run)
        self.complain()
        endless = {key: ttl for key, ttl in self.reader.ttls().items() if ttl <= 0}
        assert not endless, f"I18 broken: keys without TTL: {endless}"

    def _check_equal(self, h: Hot, s: Sql) -> None:
        both = self._held_together(s)
        s.calls = {evidence: call for evidence, call in s.calls.items() if evidence in both}
        super()._check_equal(h, s)

    def close(self) -> None:
        self.rows.close()


def _written(s: Sql) -> tuple[Any, ...]:
    return s.sv, s.pseq, s.messages, s.calls, s.commits, s.node, s.checkpoint, s.gone
