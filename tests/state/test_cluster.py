"""A hot store of several nodes: primaries die, fall silent and hand slots on, while turns go on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import redis
from sqlalchemy.engine import make_url

from state_service.adapters.redis_connect import connect
from state_service.adapters.redis_hot import RedisHot
from state_service.core import keys
from state_service.ports import Read, Scope
from tests import services
from tests.cluster import (
    ClusterNode,
    PrivateCluster,
    PrivateSentinels,
    SlotMove,
    private_cluster,
    private_sentinel,
)
from tests.conftest import or_missing
from tests.contract.test_state_history import Reader
from tests.contract.turns import StateClient, Talk, Turn, collect, new_id
from tests.servers import PrivateMariaDB, PrivateRedis, find_program, private_folder
from tests.state.rig import ENVIRONMENT, PREFIX
from tests.state.test_state_outage import away
from turnfence import records as r
from turnfence.axes import Durability
from turnfence.errors import Reason, TurnfenceError

pytestmark = [pytest.mark.servers, pytest.mark.crash]

PATIENCE_SECONDS = 30.0  # of a caller whose store is away
LEASE_MS = 3000  # so that a turn that was given up is not waited for much longer
CONVERSATIONS, TURNS_EACH = 20, 10
KILL_AFTER, RESTART_AFTER = 60, 150  # turns that have ended
ENDS = {
    *(Durability.PERSISTED, Durability.PENDING),
    *(Reason.STATE_UNAVAILABLE, Reason.STATE_FENCED, Reason.STATE_LOST, Reason.CONVERSATION_BUSY),
}

T = TypeVar("T")


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """What a harness does while the store is away: the same call again, word for word."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await call()
        except TurnfenceError as error:
            if error.reason is not Reason.STATE_UNAVAILABLE or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.05)


def key_of(talk: Talk | Scope) -> str:
    return f"{PREFIX}{keys.tag(talk.organ_id, talk.conversation_id)}:{keys.STATE}"


# --- a state service over a cluster ---------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[PrivateCluster]:
    """One that a test may break, and must leave whole."""
    with or_missing():
        find_program("redis-server", "valkey-server")
    with private_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def sql_url(mariadb_private: PrivateMariaDB) -> str:
    return mariadb_private.fresh_url()


@pytest.fixture(scope="module")
def service(cluster: PrivateCluster, sql_url: str) -> Iterator[services.Service]:
    with (
        private_folder() as folder,
        services.state_service(folder, cluster.url, sql_url, ENVIRONMENT) as running,
    ):
        yield running


@pytest.fixture
async def client(service: services.Service) -> AsyncIterator[StateClient]:
    made = StateClient(service.address)
    yield made
    await made.close()


@pytest.fixture
def talk(client: StateClient) -> Talk:
    return Talk(client)


# --- a primary dies in a crowd --------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A turn as its caller knows it: its messages, and how it ended."""

    run_id: str
    message_ids: frozenset[str]
    end: Durability | Reason | None


class Crowd:
    """Conversations that talk all at once, each turn by turn."""

    def __init__(self, client: StateClient) -> None:
        self.talks = [Talk(client) for _ in range(CONVERSATIONS)]
        self.ended: dict[str, list[Ended]] = {talk.conversation_id: [] for talk in self.talks}
        self._marks = {mark: asyncio.Event() for mark in (KILL_AFTER, RESTART_AFTER)}

    @property
    def ends(self) -> Counter[Durability | Reason | None]:
        return Counter(turn.end for turns in self.ended.values() for turn in turns)

    async def reached(self, mark: int) -> None:
        """So many turns have ended."""
        await self._marks[mark].wait()

    async def play(self, talk: Talk) -> None:
        for number in range(TURNS_EACH):
            self.ended[talk.conversation_id].append(await a_turn(talk, f"question {number}"))
            if mark := self._marks.get(self.ends.total()):
                mark.set()


async def a_turn(talk: Talk, text: str) -> Ended:
    """A turn with a caller that repeats what got no answer, and gives up what was refused."""
    request = talk.request(text, lease=LEASE_MS)
    said = {request.input.message_id}
    try:
        begun = await patiently(lambda: talk.begin_when_free(request))
        if begun.existing_run is not None:
            return Ended(request.run_id, frozenset(said), begun.existing_run.durability)
        end = await the_rest(Turn(talk, request, begun), said)
    except TurnfenceError as error:
        end = error.reason
    return Ended(request.run_id, frozenset(said), end)


async def the_rest(turn: Turn, said: set[str]) -> Durability | Reason:
    try:
        thought, answer = turn.reply("let me see"), turn.reply("it is so")
        said |= {thought.message.message_id, answer.message.message_id}
        await patiently(lambda: turn.flush(thought))
        request = turn.persist_request(answer)
        return (await patiently(lambda: turn.client.persist(request))).durability
    except TurnfenceError as error:
        with contextlib.suppress(TurnfenceError):
            await patiently(turn.abandon)
        return error.reason


def busiest(cluster: PrivateCluster, talks: list[Talk]) -> tuple[ClusterNode, str]:
    """The primary of most conversations, and the key of one of them."""
    ((node, _),) = Counter(cluster.primary_of(key_of(talk)) for talk in talks).most_common(1)
    return node, next(key_of(talk) for talk in talks if cluster.primary_of(key_of(talk)) is node)


async def test_a_crowd_outlives_the_death_of_a_primary(
    cluster: PrivateCluster, client: StateClient, mariadb_private: PrivateMariaDB, sql_url: str
) -> None:
    crowd = Crowd(client)
    victim, key = busiest(cluster, crowd.talks)
    async with asyncio.TaskGroup() as group:
        for talk in crowd.talks:
            group.create_task(crowd.play(talk))
        await crowd.reached(KILL_AFTER)
        cluster.kill(victim)
        await crowd.reached(RESTART_AFTER)
        await asyncio.to_thread(cluster.wait_replaced, victim, key)
        await asyncio.to_thread(cluster.restart, victim)
    assert cluster.primary_of(key) is not victim
    assert set(crowd.ends) <= ENDS, crowd.ends
    assert crowd.ends[Durability.PERSISTED] >= 0.8 * CONVERSATIONS * TURNS_EACH, crowd.ends
    rows = mariadb_private.execute("SELECT run_id FROM turn_commit", make_url(sql_url).database)
    committed = {str(run_id) for (run_id,) in rows}
    for talk in crowd.talks:
        persisted = [t for t in crowd.ended[talk.conversation_id] if t.end is Durability.PERSISTED]
        assert {turn.run_id for turn in persisted} <= committed
        await check_nothing_is_lost(talk, persisted)


async def check_nothing_is_lost(talk: Talk, persisted: list[Ended]) -> None:
    """A fresh turn sees all that was persisted, and so does who reads the record."""
    fresh = await talk.begin_after_lease("are you there?")
    assert (await fresh.persist()).durability is Durability.PERSISTED
    said = {message_id for turn in persisted for message_id in turn.message_ids}
    assert said <= {message.message_id for message in fresh.snapshot.dialogue}
    recorded = (await Reader(talk).messages(page_size=200)).messages
    assert said <= {message.message_id for message in recorded}
    for turn in [*persisted, Ended(fresh.run_id, frozenset(), Durability.PERSISTED)]:
        assert (await talk.get_run(turn.run_id)).durability is Durability.PERSISTED


# --- a primary is cut off -------------------------------------------------------------------------


async def heard(turn: Turn) -> int:
    """How many events of an ended turn a watcher is told; the last item is the run."""
    return len(await patiently(lambda: collect(turn.talk.watch(turn.run_id)))) - 1


@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_turns_and_watchers_find_the_successor_of_a_primary(
    cluster: PrivateCluster, talk: Talk, how: str
) -> None:
    """One that is cut off breaks no connection: it must be missed by its silence."""
    first = await talk.turn("first")
    assert await heard(first) == 2
    turn = await talk.begin("second")
    await turn.flush(turn.reply("before"))
    primary = cluster.primary_of(key_of(talk))
    with away(primary, how):
        await asyncio.to_thread(cluster.wait_replaced, primary, key_of(talk))
        during = turn.reply("during")
        await patiently(lambda: turn.flush(during))
        await turn.persist()
        assert [await heard(first), await heard(turn)] == [2, 2]
    await asyncio.to_thread(cluster.wait_healthy)
    following = await talk.begin("third")
    said = ["first", "second", "before", "during", "third"]
    assert [message.text for message in following.snapshot.dialogue] == said


# --- a slot moves ---------------------------------------------------------------------------------


class Speaker:
    """A turn that says one thing after another, and repeats what got no answer before it goes on."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.said: list[str] = []
        self._change: r.AppendMessage | None = None

    async def speak(self) -> bool:
        """Whether the store took it."""
        self._change = self._change or self.turn.reply(f"word {len(self.said)}")
        try:
            await self.turn.flush(self._change)
        except TurnfenceError as error:
            if error.reason is not Reason.STATE_UNAVAILABLE:
                raise
            return False
        self.said.append(self._change.message.text)
        self._change = None
        return True


async def others_talk(client: StateClient) -> None:
    """Many whole turns at once, none of which is repeated."""
    await asyncio.gather(*(Talk(client).turn() for _ in range(8)))


def another_primary(cluster: PrivateCluster, key: str) -> ClusterNode:
    source = cluster.primary_of(key)
    return next(node for node in cluster.nodes if node is not source and node.serves_slots())


@pytest.mark.parametrize("where", ["another primary", "a node that has just joined"])
async def test_a_turn_goes_on_while_its_slot_moves_and_nobody_else_notices(
    cluster: PrivateCluster, client: StateClient, talk: Talk, where: str
) -> None:
    speaker = Speaker(await talk.begin())
    assert await speaker.speak()
    await others_talk(client)
    known = another_primary(cluster, key_of(talk))
    target = known if where == "another primary" else await asyncio.to_thread(cluster.join)
    move = SlotMove(cluster, key_of(talk), target)
    for step in (move.announce, move.move_one, move.move_all):
        await asyncio.to_thread(step)
        await asyncio.gather(speaker.speak(), others_talk(client))
    await asyncio.to_thread(move.finish)
    assert await speaker.speak(), "a slot that has moved is found at once"
    assert cluster.primary_of(key_of(talk)) is target
    assert (await speaker.turn.persist()).durability is Durability.PERSISTED
    following = await talk.begin("next")
    assert [m.text for m in following.snapshot.dialogue] == ["hello", *speaker.said, "next"]


@pytest.fixture
async def hot(cluster: PrivateCluster) -> AsyncIterator[RedisHot]:
    opened = connect(cluster.url, prefix=PREFIX, socket_timeout=5, max_connections=16)
    yield opened
    await opened.close()


async def test_the_first_calls_find_their_nodes_all_at_once(hot: RedisHot) -> None:
    calls = (hot.read(Scope(new_id(), "c"), [Read("EXISTS", keys.STATE)]) for _ in range(64))
    assert await asyncio.gather(*calls) == [[False]] * 64


async def test_who_waits_is_not_disturbed_by_slots_that_move(cluster: PrivateCluster, hot: RedisHot) -> None:
    """redis-py would close all connections at each fifth."""
    scopes = [Scope(new_id(), "c") for _ in range(6)]
    for scope in scopes:
        assert await hot.wait_events(scope, "run", 0, block_ms=1) == []
    waiting = asyncio.create_task(hot.wait_events(scopes[0], "run", 0, block_ms=60_000))
    for scope in scopes[1:]:
        move = SlotMove(cluster, key_of(scope), another_primary(cluster, key_of(scope)))
        await asyncio.to_thread(move.announce)
        await asyncio.to_thread(move.finish)
        assert await hot.wait_events(scope, "run", 0, block_ms=1) == []
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


# --- a primary with sentinels ---------------------------------------------------------------------


@pytest.fixture
def watched() -> Iterator[PrivateSentinels]:
    with or_missing():
        find_program("redis-server", "valkey-server")
    with private_sentinel() as running:
        yield running


@pytest.fixture
async def watched_talk(watched: PrivateSentinels) -> AsyncIterator[Talk]:
    with (
        private_folder() as folder,
        services.state_service(
            folder, watched.url, f"sqlite+aiosqlite:///{folder / 'turnfence.db'}", ENVIRONMENT
        ) as service,
    ):
        client = StateClient(service.address)
        yield Talk(client)
        await client.close()


async def test_sentinels_name_the_successor_though_one_of_them_is_silent(
    watched: PrivateSentinels, watched_talk: Talk
) -> None:
    talk = watched_talk
    await talk.turn("first")
    primary = watched.primary()
    asked, *others = watched.sentinels
    asked.pause()  # connections to it do not break: it would be the first to be asked again
    watched.kill(primary)
    await asyncio.to_thread(watched.wait_replaced, primary, others)
    request = talk.request("second")
    turn = Turn(talk, request, await patiently(lambda: talk.begin_when_free(request)))
    assert [message.text for message in turn.snapshot.dialogue] == ["first", "second"]
    assert (await turn.persist()).durability is Durability.PERSISTED


# --- the embedded default -------------------------------------------------------------------------


def test_the_embedded_server_is_a_valkey(valkey: PrivateRedis) -> None:
    client: Any = redis.Redis.from_url(valkey.url)
    with contextlib.closing(client):
        found = client.info("server")
    assert found["server_name"] == "valkey"
