"""Checks a job's [[notify]], and delivers one notification: a signed webhook, a text for Slack, or an e-mail by the
operator's server.

A webhook is signed as https://www.standardwebhooks.com has it: `webhook-signature: v1,BASE64` is the HMAC-SHA256 of
`webhook-id.webhook-timestamp.body` with the tenant's secret (`opentinker webhook-secret`), without its prefix and
decoded from base64.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import html
import smtplib
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from email.headerregistry import Address
from email.message import EmailMessage
from typing import Any

import aiohttp
import orjson

from opentinker.shared.config import Settings
from opentinker.shared.security.egress import Egress
from opentinker.shared.security.secrets import read_secret
from opentinker.shared.spec import JobSpec
from opentinker.shared.spec.notify import NotifySpec
from opentinker.shared.state.notifications import PREFIX, Message
from opentinker.shared.types.errors import OpenTinkerError

TIMEOUT_S = 10.0
SHOWN = 200
"""Characters of an answer that an error quotes."""
WORDS = {"alarm": "needs a look", "target": "has reached its target"}
"""Occasions that are not states of a job or sweep."""


_MAILERS = ThreadPoolExecutor(4, thread_name_prefix="mail")
"""Own threads: a mail server that hangs holds up no other work."""


class NotDelivered(OpenTinkerError):
    """The text says why."""


async def deliver(message: Message, to: NotifySpec, secret: str, settings: Settings) -> None:
    """Raises NotDelivered."""
    try:
        async with asyncio.timeout(2 * TIMEOUT_S):
            if to.url is not None:
                await _post(message, to, secret, Egress(tuple(settings.env_egress_allow)))
            else:
                await asyncio.get_running_loop().run_in_executor(_MAILERS, _mail, message, str(to.email), settings)
    except (OSError, TimeoutError, aiohttp.ClientError, smtplib.SMTPException) as error:
        raise NotDelivered(str(error) or type(error).__name__) from None


def signature(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = hmac.new(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signed).decode()}"


async def _post(message: Message, to: NotifySpec, secret: str, egress: Egress) -> None:
    assert to.url is not None
    said = {"text": slack_text_of(message)} if to.format == "slack" else {"id": message.id, **message.body}
    body = orjson.dumps(said)
    now = int(time.time())
    headers = {
        "Content-Type": "application/json",
        "webhook-id": message.id,
        "webhook-timestamp": str(now),
        "webhook-signature": signature(secret, message.id, now, body),
    }
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        egress.session(limit=1) as http,
        http.post(to.url, data=body, headers=headers, timeout=timeout, allow_redirects=False) as response,
    ):
        if not 200 <= response.status < 300:
            answer = (await response.content.read(4 * SHOWN)).decode(errors="replace")[:SHOWN]
            raise NotDelivered(f"answered {response.status}: {answer}")


def text_of(message: Message) -> str:
    """Return the message as a line, what explains it, and the address of its page."""
    return "\n".join([*_lines_of(message), *filter(None, [message.body["page"]])])


def slack_text_of(message: Message) -> str:
    """Return the same for Slack, which takes `<...>` for mentions and links, and `&` for the beginning of an entity."""
    lines = [html.escape(line, quote=False) for line in _lines_of(message)]
    return "\n".join([*lines, *filter(None, [message.body["page"]])])


def _lines_of(message: Message) -> list[str]:
    if "sweep" in message.body:
        return _lines_of_sweep(message.body)
    job = message.body["job"]
    first = f"{job['name']} ({job['id']}) {WORDS.get(message.occasion, message.occasion)}"
    if job["steps"]:
        first += f", step {job['step']} of {job['steps']}"
    details = [f"{name}: {value}" for name, value in message.body["detail"].items()]
    return [first, *([job["reason"]] if job["reason"] else []), *details]


def _lines_of_sweep(body: dict[str, Any]) -> list[str]:
    sweep = body["sweep"]
    done = sum(sweep["trials"].values())
    said = WORDS.get(body["occasion"], body["occasion"])
    lines = [f"{sweep['name']} ({sweep['id']}) {said}, {done} of {sweep['planned']} trials"]
    if sweep["reason"]:
        lines.append(sweep["reason"])
    if best := sweep["best"]:
        settings = ", ".join(f"{path} {value}" for path, value in best["settings"].items())
        lines.append(f"best {sweep['metric']}: {best['value']:.4g} ({settings})")
    return lines


def _mail(message: Message, address: str, settings: Settings) -> None:
    """Blocking. Raises SMTPException, OSError."""
    text = text_of(message)
    mail = EmailMessage()
    mail["Subject"] = " ".join(text.splitlines()[0].split())[:200]
    name, _, domain = address.rpartition("@")
    mail["From"], mail["To"] = settings.smtp_from, Address(username=name, domain=domain)
    mail["Message-ID"] = f"<{message.id.replace('/', '.')}@opentinker>"
    mail.set_content(text)
    context = ssl.create_default_context()
    host, port = settings.smtp_host, settings.smtp_port
    with (
        smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_S, context=context)
        if settings.smtp_security == "tls"
        else smtplib.SMTP(host, port, timeout=TIMEOUT_S)
    ) as server:
        if settings.smtp_security == "starttls":
            server.starttls(context=context)
        if settings.smtp_user and settings.smtp_password_file is not None:
            server.login(settings.smtp_user, read_secret(settings.smtp_password_file, "smtp_password_file"))
        server.send_message(mail)


async def check_notify(settings: Settings, spec: JobSpec | None) -> list[dict[str, Any]]:
    """Check at submission that webhooks may be reached from here and mail may go to its addresses. Nothing is sent."""
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
