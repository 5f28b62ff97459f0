"""The operator's settings for notifications, part of `Settings` (config.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class NotificationSettings(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    public_url: Annotated[str, Field(pattern=r"^(https?://[^\s?#@]+)?$")] = ""
    """Address under which people open the page; notifications link to it."""
    smtp_host: str = ""
    """Server that sends the mails of [[notify]]; empty: none are sent. Needs `smtp_from`."""
    smtp_port: Annotated[int, Field(gt=0, le=65535)] = 587
    """Port of it."""
    smtp_security: Literal["starttls", "tls", "none"] = "starttls"
    """How the connection is encrypted."""
    smtp_user: str = ""
    """Name for its login; empty: none."""
    smtp_password_file: Path | None = None
    """File with the password for it."""
    smtp_from: str = ""
    """Address from which mails come."""
    smtp_domains: list[str] = []
    """Domains to which mails may be sent, in lower case; `*`: all. In an environment variable, with commas."""

    @field_validator("smtp_domains", mode="before")
    @classmethod
    def _domains(cls, given: object) -> object:
        return [part.strip().lower() for part in given.split(",") if part.strip()] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _mail_is_whole(self) -> Self:
        if self.smtp_host and not self.smtp_from:
            raise ValueError("smtp_host needs smtp_from: the address from which mails come")
        if self.smtp_user and self.smtp_password_file is None:
            raise ValueError("smtp_user needs smtp_password_file")
        return self
