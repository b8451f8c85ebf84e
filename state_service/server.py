"""The composition root of the state service: what it is made of, how it starts and how it stops."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import msgspec
from google.protobuf.internal import api_implementation

from state_service.adapters import redis_connect, sql_engine, sql_migrate
from state_service.adapters.embedded import EmbeddedRedis, EmbeddedUnavailable
from state_service.adapters.redis_hot import RedisHot
from state_service.adapters.sql_cold import SqlCold
from state_service.adapters.sql_engine import Transactions
from state_service.adapters.sql_history import SqlHistory
from state_service.adapters.sql_upkeep import SqlUpkeep
from state_service.conversation.stores import Stores
from state_service.conversation.sweep import Swept, sweep
from state_service.ports import Clock, StoreCorrupt, StoreUnavailable
from state_service.servicer import HistoryServicer, RunServicer, StateServicer
from state_service.settings import Settings, retention, rules
from turnfence.serving import listening
from turnfence.serving.logs import get_logger
from turnfence.serving.process import SystemClock, told_to_stop
from turnfence.serving.rpc_edge import ErrorEdge
from turnfence.state.v1 import (
    history_service_pb2,
    history_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
    state_pb2,
    state_pb2_grpc,
)

_log = get_logger(__name__)

EMBEDDED = "embedded:"
# One message carries a payload of state.payload-max-bytes or a whole snapshot, with room for their company:
# a tool result that is too large must arrive, so that it can be refused as evidence and not as a call.
MESSAGE_MAX_BYTES = 16 * 1024 * 1024

SERVICES = tuple(
    f"turnfence.state.v1.{name}"
    for module in (state_pb2, run_service_pb2, history_service_pb2)
    for name in module.DESCRIPTOR.services_by_name
)


class CannotServe(Exception):
    """Something that serving needs is missing, unfit or out of date; the text says what to change."""


async def serve(settings: Settings, ready_fd: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises ``CannotListen`` or ``CannotServe`` before anything
    is served; tells ``ready_fd`` (else standard output) the bound address once it is."""
    listening.check_address(settings.state_listen, insecure=settings.insecure)
    refuse_slow_protobuf(api_implementation.Type())
    async with (
        opened(settings, SystemClock()) as stores,
        sweeping(stores, settings),
        running(stores, settings) as address,
    ):
        listening.announce(address, ready_fd)
        await told_to_stop()
        _log.info("stopping")
    _log.info("stopped")


async def migrate(settings: Settings) -> str:
    """Bring the SQL schema to what this version works with; returns its revision. Raises ``CannotServe``
    when the database cannot be reached."""
    async with _database(settings) as transactions:
        try:
            await sql_migrate.upgrade(transactions.engine)
        except (StoreUnavailable, OSError) as error:
            raise CannotServe(f"the database cannot be reached: {error}") from error
    return sql_migrate.latest()


async def sweep_once(settings: Settings) -> Swept:
    """One sweep, of what is due now. Raises ``CannotServe``."""
    async with opened(settings, SystemClock()) as stores:
        try:
            return await sweep(stores, retention(settings.retention), batch=settings.sweeper.batch)
        except StoreUnavailable as error:
            raise CannotServe(f"a store cannot be reached: {error}") from error


def refuse_slow_protobuf(backend: str) -> None:
    """The pure Python backend of protobuf has no limit to how deep a message nests (G6)."""
    if backend == "python":
        raise CannotServe(
            "protobuf runs on its pure Python backend: install the wheel of this platform and unset "
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
        )


# --- the stores -----------------------------------------------------------------------------------


@asynccontextmanager
async def opened(settings: Settings, clock: Clock) -> AsyncIterator[Stores]:
    """Both stores, checked and up to date; closed in the opposite order. Raises ``CannotServe``."""
    async with _hot(settings) as hot, _cold(settings) as cold:
        yield Stores(
            hot=hot,
            cold=SqlCold(cold, clock),
            history=SqlHistory(cold, clock),
            upkeep=SqlUpkeep(cold),
            clock=clock,
            rules=rules(settings.state),
        )


@asynccontextmanager
async def _hot(settings: Settings) -> AsyncIterator[RedisHot]:
    async with AsyncExitStack() as stack:
        url = settings.redis_url
        if url == EMBEDDED:
            embedded = EmbeddedRedis(settings.data_dir / "redis")
            try:
                await embedded.start()
            except (EmbeddedUnavailable, OSError) as error:
                raise CannotServe(str(error)) from error
            stack.push_async_callback(embedded.stop)
            url = embedded.url
        try:
            hot = redis_connect.connect(
                url,
                prefix=settings.state.key_prefix,
                socket_timeout=settings.redis.timeout,
                max_connections=settings.redis.connections,
            )
            stack.push_async_callback(hot.close)
            _refuse(await hot.check_server())
        except ValueError as error:
            raise CannotServe(f"TURNFENCE_REDIS_URL: {error}") from error
        except (StoreUnavailable, StoreCorrupt) as error:
            raise CannotServe(f"TURNFENCE_REDIS_URL: {error}") from error
        yield hot


@asynccontextmanager
async def _cold(settings: Settings) -> AsyncIterator[Transactions]:
    async with _database(settings) as transactions:
        try:
            _refuse(await sql_engine.check_server(transactions))
            if settings.embedded_sql:
                await sql_migrate.upgrade(transactions.engine)
            found = await sql_migrate.current(transactions.engine)
        except (StoreUnavailable, StoreCorrupt, OSError) as error:
            raise CannotServe(f"the database cannot be used: {error}") from error
        if found != sql_migrate.latest():
            raise CannotServe(
                f"the SQL schema is at revision {found or 'none'}, this version works with "
                f"{sql_migrate.latest()}: run `python -m state_service migrate`"
            )
        yield transactions


@asynccontextmanager
async def _database(settings: Settings) -> AsyncIterator[Transactions]:
    try:
        engine = sql_engine.create_engine(
            settings.database_url, timeout=settings.sql.timeout, connections=settings.sql.connections
        )
    except ValueError as error:
        raise CannotServe(f"TURNFENCE_SQL_URL: {error}") from error
    transactions = Transactions(engine, timeout=settings.sql.timeout)
    try:
        yield transactions
    finally:
        await transactions.close()


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise CannotServe("\n".join(problems))


# --- the sweeper ----------------------------------------------------------------------------------


@asynccontextmanager
async def sweeping(stores: Stores, settings: Settings) -> AsyncIterator[None]:
    """Sweeps again and again inside this context. Replicas start at different times, and stay apart."""
    task = asyncio.create_task(_sweep_for_ever(stores, settings))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _sweep_for_ever(stores: Stores, settings: Settings) -> None:
    kept, batch, interval = retention(settings.retention), settings.sweeper.batch, settings.sweeper.interval
    while True:
        await asyncio.sleep(interval * random.uniform(0.8, 1.2))  # noqa: S311  jitter
        try:
            swept = await sweep(stores, kept, batch=batch)
        except Exception as error:  # noqa: BLE001 - whatever it was, the next sweep is due all the same
            _log.warning("sweep_broke_off", error_type=type(error).__name__)
        else:
            if swept != Swept(busy=swept.busy):
                _log.info("swept", **msgspec.structs.asdict(swept))


# --- the server -----------------------------------------------------------------------------------


@asynccontextmanager
async def running(stores: Stores, settings: Settings) -> AsyncIterator[str]:
    """A server that serves inside this context and yields its bound address. Leaving it drains: health says
    NOT_SERVING and no call is taken any more, calls under way get ``settings.drain`` seconds."""
    closing = asyncio.Event()
    server = grpc.aio.server(
        interceptors=[ErrorEdge()],
        options=listening.server_options(
            request_max_bytes=MESSAGE_MAX_BYTES, response_max_bytes=MESSAGE_MAX_BYTES
        ),
        maximum_concurrent_rpcs=settings.rpcs,
    )
    state_pb2_grpc.add_StateServiceServicer_to_server(StateServicer(stores, closing), server)
    run_service_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(stores), server)
    history_service_pb2_grpc.add_HistoryServiceServicer_to_server(HistoryServicer(stores), server)
    health_servicer = listening.add_health(server)
    if settings.reflection:
        listening.add_reflection(server, SERVICES)
    address = listening.bind(server, settings.state_listen)
    await server.start()
    await listening.mark_serving(health_servicer, SERVICES)
    _log.info("serving", address=address)
    try:
        yield address
    finally:
        await health_servicer.enter_graceful_shutdown()
        closing.set()
        await server.stop(settings.drain)
