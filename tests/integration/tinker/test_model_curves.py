"""Progress and metrics of the models of a Tinker server, and who may read them."""

from __future__ import annotations

import pytest

from opentinker.services.trainer.tinker.model_curves import ModelCurves
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.messaging.subjects import METRIC
from opentinker.shared.state.store import Store
from opentinker.shared.state.tinker.store import TinkerStore
from opentinker.shared.types.telemetry import MetricPoint
from opentinker.shared.types.tinker import ModelProgress
from tests.conftest import until

JOB = "j-curves0000"
OWN, FOREIGN = "s-own:train:0", "s-foreign:train:0"


async def test_every_model_has_progress_and_those_of_the_jobs_tenant_have_metrics(bus: Bus, store: Store) -> None:
    records = TinkerStore(store.redis)
    curves = ModelCurves(bus, JOB, records, lambda: 2)
    curves.tenant = "red"
    for step in (1, 2):
        for model, tenant in ((OWN, "red"), (FOREIGN, "blue")):
            curves.add_pass(model, tenant, step, loss=8.0 / step, learned=2.0, tokens=10, queue_s=0.5)
            curves.add_step(model, tenant, step)
        await curves.report()
    curves.close()
    learned = ModelProgress(passes=2, steps=2, tokens=20, queue_s=0.5, loss=2.0, curve=[4.0, 2.0])
    assert [await records.progress(model) for model in (OWN, FOREIGN)] == [learned, learned]

    async def stored() -> list[MetricPoint]:
        return [point for _, point in await bus.history(METRIC, 0, 100, job=JOB, source="*")]

    points = await until(stored, lambda found: len(found) == 4)
    assert [(point.step, point.values) for point in points if f"models/{OWN}/loss" in point.values] == [
        (step, {f"models/{OWN}/{name}": value for name, value in values.items()})
        for step, values in (
            (1, {"loss": 4.0, "tokens": 10.0, "queue_seconds": 0.5}),
            (2, {"loss": 2.0, "tokens": 10.0, "queue_seconds": 0.5}),
        )
    ]
    assert not [point for point in points if any(FOREIGN in name for name in point.values)]
    totals = [point.values for point in points if "trainer/tokens" in point.values]
    assert [one["trainer/tokens"] for one in totals] == [20.0, 20.0], "those of both tenants"
    assert totals[0]["trainer/models"] == 2.0 and totals[0]["trainer/queue_seconds"] == pytest.approx(0.5)


async def test_progress_goes_on_after_the_trainer_has_changed(bus: Bus, store: Store) -> None:
    records = TinkerStore(store.redis)
    await records.set_progress(OWN, ModelProgress(passes=7, steps=5, tokens=70, loss=3.0, curve=[5.0, 3.0]))
    curves = ModelCurves(bus, JOB, records, lambda: 1)
    curves.add_pass(OWN, "", 8, loss=2.0, learned=1.0, tokens=10, queue_s=0.0)
    await curves.report()
    curves.close()
    assert await records.progress(OWN) == ModelProgress(passes=8, steps=5, tokens=80, loss=2.0, curve=[5.0, 3.0, 2.0])
