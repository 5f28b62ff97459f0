"""Seats that a model behind a URL plays: what is refused when the job is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opentinker import AsyncClient
from opentinker.shared.runtime.service import Context
from tests.integration.scheduler.test_frozen_seats import spec_of
from tests.support.api import refused

PUBLIC = "http://93.184.215.14/v1"
KEYS = f"""
[ours]
key = "sk-canary-0123456789"
url = "{PUBLIC}"
tenants = ["default"]
[theirs]
key = "sk-canary-0123456789"
url = "{PUBLIC}"
tenants = ["red"]
"""


@pytest.fixture
def _keys(ctx: Context, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    object.__setattr__(ctx.settings, "model_keys_file", file)


def with_url(url: str, **settings: Any) -> dict[str, Any]:
    return spec_of(seats={"listener": {"url": url, "model": "big", **settings}})


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("http://127.0.0.1:8000/v1", "a loopback address"),
        ("http://10.1.2.3/v1", "not a public address"),
        ("http://169.254.169.254/v1", "link-local"),
        ("http://[::ffff:127.0.0.1]/v1", "a loopback address"),
        ("http://2130706433/v1", "a loopback address"),
        ("http://nowhere.invalid/v1", "cannot be resolved"),
    ],
)
async def test_a_url_that_may_not_be_reached_is_refused_together_with_other_mistakes(
    client: AsyncClient, address: str, kind: str
) -> None:
    found = await refused(client, with_url(address) | {"name": ""})
    assert found.keys() == {"name", "seats.listener.url"} and kind in found["seats.listener.url"]


@pytest.mark.usefixtures("_keys")
async def test_keys_are_for_the_tenants_and_urls_that_the_operator_says(client: AsyncClient) -> None:
    job = await client.submit(with_url(PUBLIC, key="ours"))
    record = await client.job(job["id"])
    assert record["spec"]["seats"]["listener"]["key"] == "ours" and "canary" not in str(record)
    for name in ("theirs", "missing"):
        found = await refused(client, with_url(PUBLIC, key=name))
        assert found == {"seats.listener.key": "is no key that your jobs may use here: the operator names them in "
                         "model_keys_file"}  # fmt: skip
    found = await refused(client, with_url("http://93.184.215.15/v1", key="ours"))
    assert found == {"seats.listener.key": f"belongs to {PUBLIC}, and is sent nowhere else"}


async def test_networks_that_the_operator_allows_are_not_refused(client: AsyncClient, ctx: Context) -> None:
    object.__setattr__(ctx.settings, "env_egress_allow", ["127.0.0.0/8"])
    await client.submit(with_url("http://127.0.0.1:8000/v1"))
    assert "no key that your jobs" in str(await refused(client, with_url("http://127.0.0.1:8000/v1", key="lab")))
