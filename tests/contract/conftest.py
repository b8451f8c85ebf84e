"""What the contract tests run against: a deployment (``--state-target``), or a real state service process
over each pair of stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests import services
from tests.conftest import Stores
from tests.contract.turns import StateClient, Talk
from tests.servers import private_folder


@pytest.fixture(scope="session")
def state_address(state_target: str | None, stores: Stores) -> Iterator[str]:
    """gRPC target of the state service under test. All tests share it, and use fresh ids."""
    if state_target is not None:
        yield state_target
        return
    with (
        private_folder() as folder,
        services.state_service(
            folder, stores.redis_url, stores.fresh_sql_url(), services.SHORT_LEASE
        ) as service,
    ):
        yield service.address


@pytest.fixture(scope="session")
async def state(state_address: str, transport: str) -> AsyncIterator[StateClient]:
    client = StateClient(state_address, by_session=transport == "session")
    yield client
    await client.close()


@pytest.fixture
def talk(state: StateClient) -> Talk:
    """A new conversation of a new user in a new organisation."""
    return Talk(state)
