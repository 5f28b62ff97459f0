"""Traces a request from HTTP to the gradient step with W3C trace context.

    traceparent of POST /v1/jobs --> job record --> log lines and spans of every lease
                                                \\-> ticket --> group --> the step that trained on it

A job submitted without a trace gets a new one. Spans are exported where OTEL_EXPORTER_OTLP_ENDPOINT is set, by
opentelemetry's SDK (the extra `otel`); ids exist in any case.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentinker.shared.types.errors import OpenTinkerError

HEADER = "traceparent"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_ZERO = re.compile(r"0+")


def incoming(headers: Mapping[str, str]) -> str:
    """The request's traceparent if it is one, else a new one. Source: W3C Trace Context, level 1."""
    given = headers.get(HEADER, "").strip()
    return given if trace_id(given) else f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def trace_id(parent: str) -> str:
    """Return the trace id of a traceparent; empty if it is invalid."""
    match = _FORM.fullmatch(parent)
    return "" if match is None or _ZERO.fullmatch(match[1]) or _ZERO.fullmatch(match[2]) else match[1]


class Tracer:
    """Tracer of one process. Without an exporter its spans do nothing."""

    def __init__(self, service: str, environ: Mapping[str, str] = os.environ) -> None:
        """Raises OpenTinkerError if spans are wanted and cannot be made."""
        self._tracer: Any = None
        self._provider: Any = None
        if ENDPOINT not in environ:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise OpenTinkerError(
                f"{ENDPOINT} is set, and {error.name} is not installed: pip install 'opentinker[otel]', or unset it"
            ) from None

        self._provider = TracerProvider(resource=Resource.create({"service.name": f"opentinker-{service}"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("opentinker")

    @contextmanager
    def span(self, name: str, parent: str, **attributes: str | int | float) -> Iterator[None]:
        """A child of `parent`, a traceparent, while the block runs."""
        if self._tracer is None or not trace_id(parent):
            yield
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({HEADER: parent})
        with self._tracer.start_as_current_span(name, context=context, attributes=attributes):
            yield

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()
