"""The chart as helm renders it, once for all tests."""

from __future__ import annotations

import pytest

from tests.nightly.deploy.rendered_chart import EVERYTHING, Objects, rendered


@pytest.fixture(scope="session")
def plain() -> Objects:
    return rendered()


@pytest.fixture(scope="session")
def whole() -> Objects:
    return rendered(EVERYTHING)
