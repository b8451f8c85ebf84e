"""Group commits for S1, S2 and S3: while one commit is on its way, what else comes waits for the next one,
which takes all of it. There is no timer, so a lone caller waits for nobody.

A group locks the rows of its conversations in one order and passes over those that somebody else holds: their
writes go alone, each in a transaction of its own, as do all of a group that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from state_service.adapters import sql_claim
from state_service.adapters.sql_calls import Duplicate
from state_service.adapters.sql_engine import Transactions
from state_service.ports import Scope, StoreCorrupt
from turnfence import records as r

LARGEST = 64  # writes of one group: a commit costs the same, but its locks are held for longer


class Asked(Protocol):
    """A write of a turn."""

    @property
    def turn(self) -> r.TurnRef: ...


A = TypeVar("A", bound=Asked)
R = TypeVar("R")
Work = Callable[[AsyncConnection, list[A]], Awaitable[Sequence[R]]]


class _Waiting(Generic[A, R]):
    def __init__(self, asked: A) -> None:
        self.asked = asked
        self.scope = Scope(asked.turn.organ_id, asked.turn.conversation_id)
        self.answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        self.answer.set_exception(error)
        self.answer.exception()  # retrieved: the caller may be gone


class Groups(Generic[A, R]):
    """One kind of write. ``work`` does those whose fence is locked and theirs, ``fenced`` answers all others.
    Safe only for what may be repeated by its identity."""

    def __init__(self, transactions: Transactions, work: Work[A, R], *, fenced: R) -> None:
        self._do = transactions
        self._work = work
        self._fenced = fenced
        self._queue: list[_Waiting[A, R]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._pumping = False

    async def put(self, asked: A) -> R:
        """Raises what the transaction raises. A cancelled caller waits for the end of its write (D31)."""
        waiting = _Waiting[A, R](asked)
        self._queue.append(waiting)
        if not self._pumping:
            self._pumping = True
            self._spawn(self._pump())
        try:
            return await asyncio.shield(waiting.answer)
        except asyncio.CancelledError:
            await asyncio.wait({waiting.answer})
            raise

    async def close(self) -> None:
        while self._running:
            await asyncio.wait(set(self._running))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _pump(self) -> None:
        while self._queue:
            await self._commit(self._next())
        self._pumping = False

    def _next(self) -> list[_Waiting[A, R]]:
        """The oldest write of each conversation that has one."""
        group: dict[Scope, _Waiting[A, R]] = {}
        for waiting in self._queue:
            if len(group) < LARGEST:
                group.setdefault(waiting.scope, waiting)
        chosen = list(group.values())
        self._queue = [waiting for waiting in self._queue if group.get(waiting.scope) is not waiting]
        return chosen

    async def _commit(self, group: list[_Waiting[A, R]]) -> None:
        try:
            answers = await self._do.write(lambda connection: self._together(connection, group))
        except (Duplicate, IntegrityError, StoreCorrupt):
            answers = {}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the callers' to judge
            for waiting in group:
                waiting.fail(error)
            return
        for waiting in group:
            if waiting.scope in answers:
                waiting.answer.set_result(answers[waiting.scope])
            else:
                self._spawn(self._alone(waiting))

    async def _together(self, connection: AsyncConnection, group: list[_Waiting[A, R]]) -> dict[Scope, R]:
        """The answers to those whose conversation nobody else holds."""
        fences = await sql_claim.lock_free(connection, [waiting.scope for waiting in group])
        free = [waiting for waiting in group if waiting.scope in fences]
        ours = [w for w in free if fences[w.scope] == (w.asked.turn.version, w.asked.turn.run_id)]
        answers = {waiting.scope: self._fenced for waiting in free}
        if ours:
            done = await self._work(connection, [waiting.asked for waiting in ours])
            answers |= {waiting.scope: answer for waiting, answer in zip(ours, done, strict=True)}
        return answers

    async def _alone(self, waiting: _Waiting[A, R]) -> None:
        async def work(connection: AsyncConnection) -> R:
            if await sql_claim.lock(connection, waiting.asked.turn) is None:
                return self._fenced
            (answer,) = await self._work(connection, [waiting.asked])
            return answer

        try:
            waiting.answer.set_result(await self._do.write(work))
        except Exception as error:  # noqa: BLE001 - its caller's to judge
            waiting.fail(error)
