"""The state service between two proxies, with a Redis and a SQL database of its own. Synchronous tests use it
through ``run``: one event loop for the proxies, the clients and everything that waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import redis
from sqlalchemy.engine import make_url

from tests import servers, services
from tests.contract.turns import StateClient
from tests.proxy import Proxy

T = TypeVar("T")
ENVIRONMENT = {
    **services.SHORT_LEASE,
    "TURNFENCE_STATE__LEASE": "60s",  # a lease ends when the test says so
    "TURNFENCE_STATE__HEARTBEAT": "20s",
    "TURNFENCE_REDIS__TIMEOUT": "2s",
    "TURNFENCE_SQL__TIMEOUT": "1s",
    "TURNFENCE_SWEEPER__INTERVAL": "1h",
    "TURNFENCE_DRAIN": "1s",
}


class Bench:
    def __init__(
        self, service: services.Service, hot: Proxy, cold: Proxy | None, hot_url: str, sql: str
    ) -> None:
        self.service = service
        self.hot_proxy, self.cold_proxy = hot, cold
        self.sql_url = sql
        self.redis: Any = redis.Redis.from_url(hot_url)
        self.client = StateClient(service.address)
        self.sql_is_down = False

    async def crash(self) -> None:
        """SIGKILL, and a new process in its place, which does not start without its database."""
        self.service.kill()
        await self.mend()
        start = asyncio.get_running_loop().run_in_executor(None, self.service.start)
        await start
        fresh = StateClient(self.service.address)
        await self.client.close()
        for part in ("channel", "state", "runs"):
            setattr(self.client, part, getattr(fresh, part))

    async def sql_down(self) -> None:
        if self.cold_proxy is not None and not self.sql_is_down:
            self.sql_is_down = True
            await self.cold_proxy.stop()

    async def mend(self) -> None:
        if self.sql_is_down and self.cold_proxy is not None:
            await self.cold_proxy.start()
        self.sql_is_down = False

    async def close(self) -> None:
        await self.client.close()
        self.redis.close()


class Loop:
    """The event loop of a bench."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        self._runner.close()


@contextlib.contextmanager
def proxied(loop: Loop, port: int) -> Iterator[Proxy]:
    proxy = Proxy("127.0.0.1", port)
    loop.run(proxy.start())
    try:
        yield proxy
    finally:
        proxy.forget()
        loop.run(proxy.stop())


@contextlib.contextmanager
def bench(loop: Loop, database: servers.PrivateMariaDB | None) -> Iterator[Bench]:
    """With a redis-server and a database of the MariaDB, or with the bundled Valkey and SQLite."""
    private = servers.private_redis() if database is not None else servers.private_valkey()
    with private as hot, servers.private_folder() as folder, proxied(loop, hot.port) as hot_proxy:
        hot_url = f"redis://127.0.0.1:{hot_proxy.port}/0"
        with contextlib.ExitStack() as stack:
            cold_proxy, sql_url, direct = None, _sqlite(folder), _sqlite(folder)
            if database is not None:
                direct = database.fresh_url()
                cold_proxy = stack.enter_context(proxied(loop, database.port))
                sql_url = make_url(direct).set(port=cold_proxy.port).render_as_string(hide_password=False)
            service = stack.enter_context(_running(loop, folder, hot_url, sql_url))
            made = loop.run(_connected(service, hot_proxy, cold_proxy, hot.url, direct))
            try:
                yield made
            finally:
                loop.run(made.close())


def _sqlite(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder / 'turnfence.db'}"


async def _connected(
    service: services.Service, hot: Proxy, cold: Proxy | None, hot_url: str, sql: str
) -> Bench:
    return Bench(service, hot, cold, hot_url, sql)


@contextlib.contextmanager
def _running(loop: Loop, folder: Path, hot_url: str, sql_url: str) -> Iterator[services.Service]:
    """Started and stopped while the loop runs: the service connects through the proxies."""
    context = services.state_service(folder, hot_url, sql_url, ENVIRONMENT)

    async def aside(work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, work, *args)

    service: services.Service = loop.run(aside(context.__enter__))
    try:
        yield service
    finally:
        loop.run(aside(context.__exit__, None, None, None))
