"""The composition root of the harness service: what it is made of, how it starts and how it stops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health

from harness_service.adapters.catalogue_yaml import CatalogueInvalid, load_catalogue
from harness_service.adapters.state_client import GrpcStateStore
from harness_service.core.catalogue import Catalogue
from harness_service.live_runs import LiveRuns
from harness_service.ports import ChatModel
from harness_service.scope import Deps
from harness_service.servicer import HarnessServicer
from harness_service.settings import LimitSettings, ModelSettings, Settings
from turnfence.harness.v1 import harness_pb2, harness_pb2_grpc
from turnfence.serving import listening
from turnfence.serving.logs import get_logger
from turnfence.serving.process import SystemClock, told_to_stop
from turnfence.serving.rpc_edge import ErrorEdge

_log = get_logger(__name__)

SERVICES = tuple(f"turnfence.harness.v1.{name}" for name in harness_pb2.DESCRIPTOR.services_by_name)
BUNDLED = Path(__file__).parent / "catalogue"
_STREAMS_END = 2.0  # seconds for streams to deliver their last events once every turn has ended


class CannotServe(Exception):
    """Something that serving needs is missing or unfit; the text says what to change."""


async def serve(settings: Settings, ready_fd: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises ``CannotListen``, ``CatalogueInvalid`` or
    ``CannotServe`` before anything is served; tells ``ready_fd`` (else standard output) the bound address
    once it is."""
    listening.check_address(settings.harness_listen, insecure=settings.insecure)
    async with AsyncExitStack() as stack:
        from harness_service.turn import build_turn

        try:
            deps = await _build(settings, stack)
        except CatalogueInvalid:
            raise
        except ValueError as error:  # what an adapter says of its part of the settings
            raise CannotServe(str(error)) from error
        runs = LiveRuns(build_turn(deps), deps.clock, settings.limits)
        servicer = HarnessServicer(
            runs,
            deps.state,
            deps.catalogue,
            deps.tools,
            reader_stall=settings.limits.reader_stall,
            timeout=settings.state.call_timeout,
        )
        async with running(servicer, runs, settings) as address:
            listening.announce(address, ready_fd)
            await told_to_stop()
            _log.info("stopping", runs=len(runs))
    _log.info("stopped")


@asynccontextmanager
async def running(servicer: HarnessServicer, runs: LiveRuns, settings: Settings) -> AsyncIterator[str]:
    """A server that serves inside this context and yields its bound address; leaving it drains (D70):
    health says NOT_SERVING and no call is taken any more, running turns are asked to stop and settle what
    they must, their streams end, then the server closes."""
    server = grpc.aio.server(
        interceptors=[ErrorEdge()],
        options=listening.server_options(
            request_max_bytes=listening.REQUEST_MAX_BYTES, response_max_bytes=listening.RESPONSE_MAX_BYTES
        ),
        maximum_concurrent_rpcs=settings.limits.rpcs,
    )
    harness_pb2_grpc.add_HarnessServiceServicer_to_server(servicer, server)
    health_servicer = listening.add_health(server)
    if settings.reflection:
        listening.add_reflection(server, SERVICES)
    address = listening.bind(server, settings.harness_listen)
    await server.start()
    await listening.mark_serving(health_servicer, SERVICES)
    _log.info("serving", address=address)
    try:
        yield address
    finally:
        await _drain(server, health_servicer, runs, settings.limits)


async def _drain(
    server: grpc.aio.Server, health_servicer: health.aio.HealthServicer, runs: LiveRuns, limits: LimitSettings
) -> None:
    await health_servicer.enter_graceful_shutdown()
    # stop() refuses new calls at once; its grace covers the turns' end and the last events on their way.
    stopping = asyncio.create_task(server.stop(limits.drain + _STREAMS_END))
    await runs.drain(limits.drain)
    await stopping


async def _build(settings: Settings, stack: AsyncExitStack) -> Deps:
    """Everything a turn needs; ``stack`` closes it in the opposite order. The heavy imports are here."""
    from harness_service.adapters.markdown_knowledge import MarkdownKnowledge
    from harness_service.adapters.mcp_tools import McpTools

    catalogue = load_catalogue(settings.catalogue or BUNDLED)
    tools = McpTools(
        catalogue.mcp_servers.values(),
        catalogue.tools.values(),
        max_result_bytes=settings.state.payload_max_bytes,
        env={**os.environ, "TURNFENCE_DATA_DIR": str(settings.data_dir.absolute())},
    )
    stack.push_async_callback(tools.close)
    await tools.start()
    model = _model(settings.model, catalogue)
    stack.push_async_callback(model.close)
    guard_model = model if settings.guard_model is None else _model(settings.guard_model, catalogue)
    if guard_model is not model:
        stack.push_async_callback(guard_model.close)
    knowledge = MarkdownKnowledge(settings.knowledge or BUNDLED / "knowledge")
    stack.push_async_callback(knowledge.close)
    state = GrpcStateStore(settings.state_target)
    stack.push_async_callback(state.close)
    return Deps(
        state=state,
        model=model,
        guard_model=guard_model,
        tools=tools,
        knowledge=knowledge,
        catalogue=catalogue,
        clock=SystemClock(),
        settings=settings,
    )


def _model(settings: ModelSettings, catalogue: Catalogue) -> ChatModel:
    if settings.provider == "runbook":
        from harness_service.adapters.runbook_model import RunbookModel

        return RunbookModel(catalogue)
    from harness_service.adapters.openai_model import OpenAiModel

    return OpenAiModel(
        base_url=settings.base_url,
        api_key=settings.api_key.get_secret_value(),
        name=settings.name,
        max_tokens=settings.max_tokens,
    )
