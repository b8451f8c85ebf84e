"""A state service over stores of its own, all of which a test may kill, and a client that finds it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from tests import servers, services
from tests.contract.turns import StateClient, Talk

PREFIX = "g2rain:rt:"
OUTAGE_SECONDS = 1  # after which a store that does not answer is given up
ENVIRONMENT = {
    **services.SHORT_LEASE,
    "TURNFENCE_REDIS__TIMEOUT": f"{OUTAGE_SECONDS}s",
    "TURNFENCE_SQL__TIMEOUT": f"{OUTAGE_SECONDS}s",
    "TURNFENCE_DRAIN": "1s",
}


class Rig:
    def __init__(
        self,
        service: services.Service,
        hot: servers.PrivateRedis,
        cold: servers.PrivateMariaDB | None,
    ) -> None:
        self.service = service
        self.hot = hot
        self.cold = cold
        self._client: StateClient | None = None

    @property
    def client(self) -> StateClient:
        assert self._client is not None, "reconnect first"
        return self._client

    async def reconnect(self) -> None:
        """A service that runs, and a fresh channel for all who hold the client."""
        if not self.service.alive:
            self.service.start()
        fresh = StateClient(self.service.address)
        if self._client is None:
            self._client = fresh
        else:
            await self._client.close()
            for part in ("channel", "state", "runs"):
                setattr(self._client, part, getattr(fresh, part))
        async with asyncio.timeout(services.READY_SECONDS):
            await self.client.channel.channel_ready()

    async def crash(self) -> None:
        """SIGKILL, and a new process in its place."""
        self.service.kill()
        await self.reconnect()

    async def end_while_busy(self, *, gently: bool) -> None:
        """The process ends while the loop goes on calling it."""
        end = self.service.stop if gently else self.service.kill
        await asyncio.get_running_loop().run_in_executor(None, end)

    def database(self) -> servers.PrivateMariaDB:
        assert self.cold is not None
        return self.cold

    @contextlib.contextmanager
    def redis(self) -> Iterator[Any]:
        with contextlib.closing(redis.Redis.from_url(self.hot.url)) as client:
            yield client

    def flush_all(self) -> None:
        with self.redis() as client:
            client.flushall()

    def ttls(self, talk: Talk) -> dict[str, int]:
        """Every key of a conversation, without what all have in common → its TTL in milliseconds."""
        base = f"{PREFIX}{{{talk.organ_id}:{talk.conversation_id}}}:"
        with self.redis() as client:
            keys = [key.decode() for key in client.scan_iter(count=1000)]
            ours = [key for key in keys if talk.conversation_id in key]
            assert all(key.startswith(base) for key in ours), ours
            return {key.removeprefix(base): client.pttl(key) for key in ours}

    def image(self, talk: Talk) -> dict[bytes, bytes]:
        """A conversation's keys as they are now, for ``restore``."""
        with self.redis() as client:
            keys = list(client.scan_iter(f"*{talk.conversation_id}*", count=1000))
            return {key: client.dump(key) for key in keys}

    def restore(self, talk: Talk, image: dict[bytes, bytes]) -> None:
        """The conversation's hot data goes back in time."""
        with self.redis() as client:
            for key in client.scan_iter(f"*{talk.conversation_id}*", count=1000):
                client.delete(key)
            for key, value in image.items():
                client.restore(key, 600_000, value)

    def unhealthy(self, talk: Talk) -> dict[str, int]:
        """Keys of a conversation that would never go."""
        ttls = self.ttls(talk)
        assert ttls, "the conversation has no keys"
        return {key: ttl for key, ttl in ttls.items() if ttl <= 0}


@contextlib.contextmanager
def embedded() -> Iterator[Rig]:
    """The bundled Valkey and SQLite."""
    with servers.private_valkey() as hot, servers.private_folder() as folder:
        url = f"sqlite+aiosqlite:///{folder / 'turnfence.db'}"
        with services.state_service(folder, hot.url, url, ENVIRONMENT) as service:
            yield Rig(service, hot, None)


@contextlib.contextmanager
def of_servers(template: Path) -> Iterator[Rig]:
    """A redis-server and a MariaDB."""
    with (
        servers.private_redis() as hot,
        servers.private_mariadb(template) as cold,
        servers.private_folder() as folder,
        services.state_service(folder, hot.url, cold.fresh_url(), ENVIRONMENT) as service,
    ):
        yield Rig(service, hot, cold)
