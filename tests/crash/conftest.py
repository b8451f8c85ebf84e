"""A pair whose every process may be killed: its stores are its own, and it reaches them through proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy.engine import make_url

from tests import servers, services
from tests.conftest import or_missing
from tests.model_server import ModelServer
from tests.pair.caller import Caller
from tests.pair.conftest import HARNESS
from tests.pair.rig import Rig, write_catalogue
from tests.proxy import Proxy, running
from tests.tool_sim import Sim

STATE = {
    **services.SHORT_LEASE,
    "TURNFENCE_REDIS__TIMEOUT": "1s",
    "TURNFENCE_SQL__TIMEOUT": "1s",
    "TURNFENCE_SWEEPER__INTERVAL": "1h",  # what is left is the next turn's to find
}


@dataclass
class Victims:
    """The pair, its stores, and the lines between them."""

    rig: Rig
    hot: servers.PrivateRedis
    cold: servers.PrivateMariaDB
    hot_line: Proxy
    cold_line: Proxy
    state_line: Proxy
    redis: Any
    sql_url: str

    def line(self, store: str) -> Proxy:
        return {"hot": self.hot_line, "cold": self.cold_line, "state": self.state_line}[store]

    def kill(self, victim: str) -> None:
        match victim:
            case "harness":
                self.rig.pair.harness.kill()
            case "state":
                self.rig.pair.state.kill()
            case "redis":
                self.hot.kill()
            case "sql":
                self.cold.kill()

    async def whole(self) -> None:
        """Whatever is dead lives again, and all have found each other."""
        loop = asyncio.get_running_loop()
        for server in (self.hot, self.cold):
            if server.pid() is None:
                await loop.run_in_executor(None, server.start)
        for service in (self.rig.pair.state, self.rig.pair.harness):
            if not service.alive:
                await loop.run_in_executor(None, service.start)
        await self.rig.in_touch()


async def aside(work: Any, *args: Any) -> Any:
    """Blocking work, while the proxies go on."""
    return await asyncio.get_running_loop().run_in_executor(None, work, *args)


@pytest.fixture(scope="session")
async def shared_victims(
    mariadb_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Victims]:
    sim = Sim(tmp_path_factory.mktemp("tools"))
    async with AsyncExitStack() as stack:
        with or_missing():
            hot = stack.enter_context(servers.private_redis())
            cold = stack.enter_context(servers.private_mariadb(mariadb_template))
        folder = stack.enter_context(servers.private_folder())
        write_catalogue(folder / "catalogue", sim)
        hot_line = await stack.enter_async_context(running("127.0.0.1", hot.port))
        cold_line = await stack.enter_async_context(running("127.0.0.1", cold.port))
        model = await stack.enter_async_context(ModelServer({}))
        direct = make_url(cold.fresh_url())
        below_context = services.state_service(
            folder,
            f"redis://127.0.0.1:{hot_line.port}/0",
            direct.set(port=cold_line.port).render_as_string(hide_password=False),
            STATE,
            listen="127.0.0.1:0",
        )
        below: services.Service = await aside(below_context.__enter__)
        stack.push_async_callback(aside, below_context.__exit__, None, None, None)
        state_line = await stack.enter_async_context(running("127.0.0.1", _port(below)))
        environment = (
            HARNESS
            | services.SHORT_LEASE
            | {
                "TURNFENCE_MODEL__BASE_URL": model.base_url,
                "TURNFENCE_CATALOGUE": str(folder / "catalogue"),
            }
        )
        above_context = services.harness_service(folder, f"127.0.0.1:{state_line.port}", environment)
        above: services.Service = await aside(above_context.__enter__)
        stack.push_async_callback(aside, above_context.__exit__, None, None, None)
        caller = Caller(above.address)
        stack.push_async_callback(caller.close)
        rig = Rig(services.Pair(below, above), model, sim, caller)
        client = redis.Redis.from_url(hot.url)
        stack.callback(client.close)
        yield Victims(rig, hot, cold, hot_line, cold_line, state_line, client, str(direct))


def _port(service: services.Service) -> int:
    return int(service.address.rpartition(":")[2])


@pytest.fixture
async def victims(shared_victims: Victims) -> Victims:
    await shared_victims.whole()
    await shared_victims.rig.reset()
    return shared_victims
