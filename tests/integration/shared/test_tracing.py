"""A job's trace: from the request that submitted it to the step that it made."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from opentinker.shared.runtime.tracing import ENDPOINT, HEADER, Tracer, incoming, trace_id
from opentinker.shared.state.store import Store
from opentinker.shared.types.errors import OpenTinkerError
from tests.support.api import SPEC, Http

ID = "0af7651916cd43dd8448eb211c80319c"
GIVEN = f"00-{ID}-b7ad6b7169203331-01"


def test_a_traceparent_is_taken_and_nothing_else() -> None:
    assert incoming({HEADER: GIVEN}) == GIVEN and trace_id(GIVEN) == ID
    for wrong in ("", "x", GIVEN.upper(), GIVEN + "-x", f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-{ID}-{'0' * 16}-01"):
        made: Mapping[str, str] = {HEADER: wrong}
        assert trace_id(wrong) == "" and trace_id(incoming(made)) not in ("", ID)


async def test_a_job_keeps_the_trace_of_the_request_that_submitted_it(http: Http, store: Store) -> None:
    status, job = await http("POST", "/v1/jobs", json=SPEC, headers={HEADER: GIVEN})
    assert status == 201 and job["trace"] == GIVEN and (await store.job(job["id"])).trace == GIVEN
    _, other = await http("POST", "/v1/jobs", json=SPEC, headers={HEADER: "00-bad"})
    assert trace_id(other["trace"]) not in ("", ID)


def test_spans_need_an_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    with Tracer("trainer", {}).span("step", GIVEN, step=1):
        pass
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = trace.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    tracer = Tracer("trainer", {})
    tracer._provider, tracer._tracer = provider, provider.get_tracer("test")
    with tracer.span("step", GIVEN, step=7), tracer.span("other", "no parent"):
        pass
    tracer.close()
    (span,) = memory.get_finished_spans()
    assert (span.name, f"{span.context.trace_id:032x}", span.attributes["step"]) == ("step", ID, 7)
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"


def test_an_exporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(OpenTinkerError, match=r"pip install 'opentinker\[otel\]'"):
        Tracer("trainer", {ENDPOINT: "http://127.0.0.1:1"})
