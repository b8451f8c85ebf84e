"""The hot store at a URL: one server, a Cluster, or whoever the Sentinels name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import redis.asyncio as redis_asyncio
from redis import exceptions as redis_errors
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from state_service.adapters.redis_hot import RedisHot


def connect(url: str, *, prefix: str, socket_timeout: float, max_connections: int) -> RedisHot:
    """The store at a URL; connects at the first call. ``socket_timeout``: seconds that one call may take
    altogether. ``max_connections``: for calls, and as many again for watchers of events.

    ``redis://``, ``rediss://`` and ``unix://`` as redis-py has them;
    ``redis[s]+cluster://[user:password@]host:port[,host:port]``;
    ``redis[s]+sentinel://[user:password@]host:port[,host:port]/master[/db]``, where
    ``?sentinel_username=…&sentinel_password=…`` are for the sentinels themselves.
    Raises ValueError for any other URL.
    """
    make = _CONNECT.get(urlsplit(url).scheme)
    if make is None:
        raise ValueError(f"no URL of a hot store: it must begin with one of {', '.join(sorted(_CONNECT))}")

    def client() -> Any:
        made = make(url, _options(socket_timeout, max_connections))
        made.set_response_callback("XREAD", _as_it_came)
        return made

    return RedisHot(
        client(),
        client(),
        prefix=prefix,
        socket_timeout=socket_timeout,
        max_connections=max_connections,
        is_cluster=make is _connect_cluster,
    )


def _as_it_came(response: Any, **_options: Any) -> Any:
    return response


def _options(socket_timeout: float, max_connections: int) -> dict[str, Any]:
    """No retries (a script would run again), no time limit below ours (redis-py's own runs on
    asyncio.wait_for, which can swallow a cancellation), and RESP2, the same from every server."""
    return {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
        "socket_connect_timeout": socket_timeout,
        "max_connections": max_connections,
    }


def _connect_one(url: str, options: dict[str, Any]) -> Any:
    return redis_asyncio.Redis.from_url(url, **options)


def _connect_cluster(url: str, options: dict[str, Any]) -> Any:
    many = _many_hosts(url)
    nodes = [ClusterNode(host, port) for host, port in many.hosts]
    return _Cluster(
        startup_nodes=nodes,
        require_full_coverage=False,
        reinitialize_steps=0,  # else each fifth MOVED closes the connections of all other calls
        **many.options,
        **options,
    )


class _Cluster(RedisCluster):
    """redis-py's client, and what it lacks to find its way after a failover or a resharding."""

    def look_again(self) -> None:
        """The next call asks who serves what. redis-py itself does so when a connection breaks; a machine
        that is cut off breaks none, and its successor would never be found."""
        self._initialize = True

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            await self.initialize()  # redis-py would send the first calls to any node
            if args[0] == "XREAD":
                # redis-py would ask a server where the key is: always the same one, dead or not
                options["target_nodes"] = self.get_node_from_key(args[args.index("STREAMS") + 1])
            return await super().execute_command(*args, **options)
        except (KeyError, redis_errors.SlotNotCoveredError) as error:
            self.look_again()
            raise redis_errors.SlotNotCoveredError("no node is known to serve this key") from error

    def get_node(self, *args: Any, **wanted: Any) -> ClusterNode:
        """redis-py follows an ASK to a node that it has not heard of yet as if it were None."""
        found = super().get_node(*args, **wanted)
        if found is None:
            raise redis_errors.ClusterError("a slot is on its way to a node that is not known yet")
        return found


def _connect_sentinel(url: str, options: dict[str, Any]) -> Any:
    many = _many_hosts(url)
    master, _, db = many.path.partition("/")
    if not master:
        raise ValueError("a sentinel URL ends in /master or /master/db")
    own = {key: many.options.pop(f"sentinel_{key}", None) for key in ("username", "password")}
    secure = {key: value for key, value in many.options.items() if key.startswith("ssl")}
    settings = {**options, **secure, **own}
    sentinel = _Sentinels(many.hosts, sentinel_kwargs=settings)
    client = sentinel.master_for(master, db=int(db or 0), **many.options, **options)
    return _BehindSentinel(sentinel, client)


class _Sentinels(Sentinel):
    """Asked by one caller at a time: redis-py moves the one that answered to the front of its list, and two
    who do that at once lose another from it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self._asking = asyncio.Lock()

    async def discover_master(self, service_name: str) -> Any:
        async with self._asking:
            try:
                return await super().discover_master(service_name)
            except asyncio.CancelledError:  # one that is silent must not be the first again
                self.sentinels.append(self.sentinels.pop(0))
                raise


class _BehindSentinel:
    """The primary's client, together with the sentinels' own: who closes one closes all."""

    def __init__(self, sentinel: Any, client: Any) -> None:
        self._sentinel = sentinel
        self._client = client
        self.execute_command = client.execute_command
        self.set_response_callback = client.set_response_callback

    async def aclose(self) -> None:
        await self._client.aclose()
        await self._sentinel.aclose()


_CONNECT: Mapping[str, Callable[[str, dict[str, Any]], Any]] = {
    "redis": _connect_one,
    "rediss": _connect_one,
    "unix": _connect_one,
    "redis+cluster": _connect_cluster,
    "rediss+cluster": _connect_cluster,
    "redis+sentinel": _connect_sentinel,
    "rediss+sentinel": _connect_sentinel,
}


class _ManyHosts(msgspec.Struct, frozen=True):
    hosts: list[tuple[str, int]]
    path: str
    options: dict[str, Any]


def _many_hosts(url: str) -> _ManyHosts:
    """A URL with several hosts; credentials and ``?options`` are read as redis-py reads them."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    scheme = parts.scheme.partition("+")[0]
    options: dict[str, Any] = dict(parse_url(f"{scheme}://{user}{at}localhost?{parts.query}"))
    options.pop("host", None)
    if options.pop("connection_class", None) is SSLConnection:
        options["ssl"] = True
    return _ManyHosts(
        hosts=[_host_and_port(host) for host in hosts.split(",")],
        path=unquote(parts.path.strip("/")),
        options=options,
    )


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{text!r} is no host:port")
    return host.strip("[]"), int(port)
