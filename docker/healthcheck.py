"""Asks the service in this container for its gRPC health: exit 0 when it says SERVING, 1 otherwise.

``healthcheck.py VARIABLE DEFAULT``: VARIABLE names the setting that holds the listen address. With TLS
(TURNFENCE_TLS__CERT is set) no client certificate lies here, so the check is that the port accepts.
"""

from __future__ import annotations

import os
import socket
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 3.0


def reachable(listen: str) -> str:
    """The listen address as a client inside the container reaches it: 0.0.0.0:7070 becomes 127.0.0.1:7070."""
    for everywhere in ("0.0.0.0:", "[::]:"):
        if listen.startswith(everywhere):
            return "127.0.0.1:" + listen.removeprefix(everywhere)
    return listen


def serving(address: str) -> bool:
    """Whether the service behind the address answers SERVING within three seconds."""
    with grpc.insecure_channel(address) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined] # not in the stubs
            answer = check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError as error:
            sys.stderr.write(f"{address}: {error}\n")
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def accepting(address: str) -> bool:
    """Whether the port accepts a connection within three seconds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
    except OSError as error:
        sys.stderr.write(f"{address}: {error}\n")
        return False
    return True


def main(variable: str, default: str) -> int:
    address = reachable(os.environ.get(variable, default))
    check = (
        accepting if os.environ.get("TURNFENCE_TLS__CERT") and not address.startswith("unix:") else serving
    )
    return 0 if check(address) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
