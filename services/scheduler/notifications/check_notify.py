"""Checks a job's [[notify]] at submission: may its webhooks be reached from here, may mail go to its addresses."""

from __future__ import annotations

from typing import Any

from opentinker.shared.config import Settings
from opentinker.shared.security.egress import Egress
from opentinker.shared.spec import JobSpec


async def check_notify(settings: Settings, spec: JobSpec | None) -> list[dict[str, Any]]:
    """Return mistakes. Nothing is sent."""
    egress = Egress(tuple(settings.env_egress_allow))
    mistakes: list[dict[str, Any]] = []
    for place, entry in enumerate(spec.notify if spec is not None else ()):
        if entry.url is not None:
            if problem := await egress.refusal(entry.url):
                mistakes.append({"field": f"notify.{place}.url", "value": entry.url, "problem": problem})
        elif problem := _mail_problem(settings, str(entry.email)):
            mistakes.append({"field": f"notify.{place}.email", "value": entry.email, "problem": problem})
    return mistakes


def _mail_problem(settings: Settings, address: str) -> str:
    if not settings.smtp_host:
        return "this server sends no mail: its operator sets smtp_host, or use a webhook (url)"
    domain = address.rpartition("@")[2].lower()
    if domain in settings.smtp_domains or "*" in settings.smtp_domains:
        return ""
    allowed = ", ".join(settings.smtp_domains) or "none"
    return f"this server sends no mail to {domain}; to: {allowed} (operator setting smtp_domains)"
