"""Whatever is pushed is a package or is refused in words, and costs the scheduler next to nothing."""

from __future__ import annotations

import io
import resource
import time
from pathlib import Path

import pytest

from opentinker.services.scheduler.environments.unpack import read
from opentinker.services.scheduler.environments.upload import Uploads
from opentinker.shared.data import uploads
from opentinker.shared.types.errors import SpecError
from tests.conftest import Figure
from tests.samples.archives import ARCHIVES, costly, dotted, good
from tests.samples.upload_samples import receive
from tests.support.api import Http

MIB = 1 << 20


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_a_package_or_is_refused_in_words(name: str, tmp_path: Path) -> None:
    build, words = ARCHIVES[name]
    outcome = read(io.BytesIO(build()), tmp_path / "files", MIB, "")
    assert outcome.errno == 0
    if words:
        with pytest.raises(SpecError, match=words):
            raise SpecError(outcome.mistakes)
    assert outcome.package is not None or all(mistake["problem"] for mistake in outcome.mistakes)
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


def test_what_no_bound_foresaw_ends_a_process_of_its_own(tmp_path: Path) -> None:
    held = Uploads(tmp_path / "data", 32)
    with pytest.raises(SpecError, match="cannot be read with 512 MB of memory and 30 s of processor time"):
        receive(held, costly())
    assert not list(uploads.home(tmp_path / "data").iterdir()), "something was left"


async def test_archives_over_http_are_answered_422_and_cost_the_scheduler_nothing(http: Http, figure: Figure) -> None:
    attacks = {"30 KB of dots": good(pyproject__toml=dotted(15000)), "a costly lock": costly()}
    attacks |= {name: ARCHIVES[name][0]() for name in ("sparse_by_pax", "toml_of_brackets", "symlink_out")}
    for name, tar in attacks.items():
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
        status, body = await http("POST", "/v1/environments", data=io.BytesIO(tar))
        assert status == 422 and body["errors"][0]["problem"], f"{name}: {status} {body}"
        spent = time.process_time() - began
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss
        figure(f"{name}: the scheduler spends {spent:.2f} s of processor time and grows by {grown / 1024:.1f} MB")
        assert spent < 1 and grown < 20 * 1024, f"{name}: {spent:.2f} s, {grown / 1024:.0f} MB"
