"""Dockerfile, compose file and health check agree with each other and with the project they deploy."""

from __future__ import annotations

import re
import runpy
import socket
import subprocess
import sys
import tomllib
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def stages() -> dict[str, str]:
    """Each build stage of the Dockerfile with its own text."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("stage", "port"), [("state", 7071), ("harness", 7070)])
def test_each_service_has_an_image_with_its_entry_point_and_health_check(stage: str, port: int) -> None:
    text = stages()[stage]
    assert f'ENTRYPOINT ["{stage}-service"]' in text
    assert f"{stage}-service" in PROJECT["scripts"]
    assert f"EXPOSE {port}" in text
    assert f'"TURNFENCE_{stage.upper()}_LISTEN", "127.0.0.1:{port}"' in text


def test_images_do_not_run_as_root() -> None:
    assert "USER 10001:10001" in stages()["runtime"]


def test_what_the_image_copies_is_let_through_and_exists() -> None:
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, flags=re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert copied == let_through
    assert not {name for name in copied if not (ROOT / name).exists()}


@pytest.mark.parametrize("name", ["migrate", "state", "harness"])
def test_compose_builds_stages_that_exist(name: str) -> None:
    build = SERVICES[name]["build"]
    assert build["target"] in stages()
    assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == (DOCKER / "Dockerfile").resolve()


def test_nobody_waits_for_a_service_that_cannot_say_it_is_ready() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                built = "HEALTHCHECK" in stages().get(SERVICES[other].get("build", {}).get("target", ""), "")
                assert built or "healthcheck" in SERVICES[other], f"{name} waits for {other}"


def test_the_state_service_starts_on_a_migrated_schema() -> None:
    assert SERVICES["state"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    assert SERVICES["migrate"]["command"] == ["migrate"]
    assert SERVICES["migrate"]["environment"].items() <= SERVICES["state"]["environment"].items()


def test_the_hot_store_never_evicts_and_every_volume_is_declared() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    mounted = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert mounted == set(COMPOSE["volumes"])


def test_ports_are_published_on_loopback_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:7070:7070"]


# --- the health check, against a real server ----------------------------------------------------------


def check(address: str) -> int:
    command = [sys.executable, str(DOCKER / "healthcheck.py"), "TURNFENCE_NO_SUCH_SETTING", address]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode


def test_health_check_tells_serving_from_draining_from_gone() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2), options=[("grpc.so_reuseport", 0)])
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        assert check(f"0.0.0.0:{port}") == 0
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert check(f"127.0.0.1:{port}") == 1
    finally:
        server.stop(0).wait()
    assert check(f"127.0.0.1:{port}") == 1


def test_health_check_behind_tls_looks_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(DOCKER / "healthcheck.py"))
    monkeypatch.setenv("TURNFENCE_TLS__CERT", "server.pem")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert script["main"]("TURNFENCE_NO_SUCH_SETTING", f"[::]:{port}") == 0
    assert script["main"]("TURNFENCE_NO_SUCH_SETTING", f"127.0.0.1:{port}") == 1
