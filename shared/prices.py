"""The operator's prices, part of `Settings` (config.py)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_PRICE = 1e6


class PriceSettings(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    price_worker_hour: Annotated[float, Field(ge=0, le=MAX_PRICE)] = 0.0
    """Price of a leased trainer or rollout worker for an hour, in `price_currency`. Estimates of jobs name what they
    would cost if it or the next one is set; nothing is charged."""
    price_gpu_hour: Annotated[float, Field(ge=0, le=MAX_PRICE)] = 0.0
    """Price of each GPU of a leased worker for an hour, in addition."""
    price_currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    """Currency of both, by its three letters."""

    def cost(self, worker_s: float, gpu_s: float) -> float | None:
        """Return the price of these seconds of workers and GPUs; None if the operator has set no price."""
        if not self.price_worker_hour and not self.price_gpu_hour:
            return None
        return (worker_s * self.price_worker_hour + gpu_s * self.price_gpu_hour) / 3600
