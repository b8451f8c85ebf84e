"""The pair as its callers see it: both services as processes over each pair of stores, with a model and a
tool server that do what a test tells them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import services
from tests.conftest import Stores
from tests.model_server import ModelServer
from tests.pair.caller import Caller
from tests.pair.rig import Rig, write_catalogue
from tests.servers import private_folder
from tests.tool_sim import Sim

HARNESS = {
    "TURNFENCE_MODEL__PROVIDER": "openai",
    "TURNFENCE_MODEL__NAME": "stand-in",
    "TURNFENCE_MODEL__TIMEOUT": "2s",
    "TURNFENCE_STATE__CALL_TIMEOUT": "5s",
    **services.KEPT_LEASE,
}


@pytest.fixture(scope="session")
async def shared_rig(stores: Stores, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """One pair for all tests over these stores; a test that kills a service starts it again."""
    sim = Sim(tmp_path_factory.mktemp("tools"))
    with private_folder() as folder:
        catalogue = folder / "catalogue"
        write_catalogue(catalogue, sim)
        async with ModelServer({}) as model:
            harness = HARNESS | {
                "TURNFENCE_MODEL__BASE_URL": model.base_url,
                "TURNFENCE_CATALOGUE": str(catalogue),
            }
            with services.pair(
                Path(folder),
                stores.redis_url,
                stores.fresh_sql_url(),
                state=services.KEPT_LEASE,
                harness=harness,
            ) as pair:
                caller = Caller(pair.harness.address)
                yield Rig(pair, model, sim, caller)
                await caller.close()


@pytest.fixture
async def rig(shared_rig: Rig) -> Rig:
    """The pair, whole, with stand-ins that were told nothing yet."""
    await shared_rig.reset()
    return shared_rig
