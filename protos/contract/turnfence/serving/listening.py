"""How a service listens: its address, the gRPC server's options, health, reflection, and telling a parent
process that it is ready. Knows nothing of what is served."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

REQUEST_MAX_BYTES = 1024 * 1024
RESPONSE_MAX_BYTES = 4 * 1024 * 1024
_METADATA_MAX_BYTES = 16 * 1024

_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


class CannotListen(Exception):
    """The address is refused, malformed, or taken; the text says which and what to do."""


def server_options(*, request_max_bytes: int, response_max_bytes: int) -> list[tuple[str, int]]:
    """The gRPC server's options; each deviates from its default for the reason beside it."""
    return [
        ("grpc.so_reuseport", 0),  # on, a second (or a stale) server shares the port without an error
        ("grpc.max_receive_message_length", request_max_bytes),
        ("grpc.max_send_message_length", response_max_bytes),
        ("grpc.max_metadata_size", _METADATA_MAX_BYTES),
        # Bursts above the default of 1,000 that wait to be accepted end as CANCELLED, unseen by any handler.
        ("grpc.server.max_pending_requests", 10_000),
        ("grpc.server.max_pending_requests_hard_limit", 20_000),
        # A frozen or cut-off peer is noticed after 30 s; keepalive alone does not notice one, the ping does.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        # Callers may ping every 10 s, also between calls.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]


def check_address(address: str, *, insecure: bool) -> None:
    """Raise ``CannotListen`` for what is no ``host:port`` or ``unix:/path``, and, unless ``insecure``, for
    what other machines can reach: without TLS anybody there could read and act for every user."""
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").removeprefix("//").startswith("/"):
            raise CannotListen(
                f"{address}: a unix socket needs an absolute path, as in unix:/run/turnfence.sock"
            )
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise CannotListen(f"{address}: must be host:port or unix:/path")
    if not insecure and not _is_loopback(host.removeprefix("[").removesuffix("]")):
        raise CannotListen(
            f"{address} can be reached from other machines, and this version serves no TLS: listen on "
            "127.0.0.1 or a unix socket, or set TURNFENCE_INSECURE=1 where the network is trusted"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(server: grpc.aio.Server, address: str) -> str:
    """Listen; returns the address with the port that was given for port 0. Raises ``CannotListen``."""
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        raise CannotListen(f"{address}: cannot be bound; is another process listening there?") from None
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def add_health(server: grpc.aio.Server) -> health.aio.HealthServicer:
    """The standard health service; NOT_SERVING until ``mark_serving``."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


async def mark_serving(servicer: health.aio.HealthServicer, services: Sequence[str]) -> None:
    for name in ("", *services):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Reflection as v1alpha, which the library brings, and as v1, which is the same on the wire."""
    names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME, _REFLECTION_V1]
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(names)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_REFLECTION_V1, {"ServerReflectionInfo": method}),)
    )


def announce(address: str, ready_fd: int | None) -> None:
    """Tell whoever started this process that it is listening: one line with the bound address, on
    ``ready_fd`` (which is closed then, so that a reader sees the end), else on standard output."""
    if ready_fd is None:
        print(f"listening on {address}", flush=True)
        return
    with os.fdopen(ready_fd, "w", encoding="utf-8") as ready:
        ready.write(f"{address}\n")
