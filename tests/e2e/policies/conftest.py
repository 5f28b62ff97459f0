"""One cluster for the tests of a file that need no settings of their own. Each test ends its jobs; what it kills comes
back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.support.cluster import Toys, toy_cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def toy_services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Toys]:
    async with toy_cluster(tmp_path_factory.mktemp("policies")) as running:
        yield running


@pytest.fixture
def toys(request: pytest.FixtureRequest, toy_services: Toys) -> Iterator[Toys]:
    """The file's light cluster and a model for its jobs; a test that fails shows what its services said."""
    failed = request.session.testsfailed
    yield toy_services
    if request.session.testsfailed > failed:
        toy_services[0].show()
