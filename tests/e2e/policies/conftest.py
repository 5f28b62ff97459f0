"""One cluster for the tests of a file that need no settings of their own. Each test ends its jobs; what it kills comes
back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Toys, shared_fixture, toy_cluster

toy_services = shared_fixture(toy_cluster)


@pytest.fixture
def toys(request: pytest.FixtureRequest, toy_services: Toys) -> Iterator[Toys]:
    """The file's light cluster and a model for its jobs; a test that fails shows what its services said."""
    failed = request.session.testsfailed
    yield toy_services
    if request.session.testsfailed > failed:
        toy_services[0].show()
