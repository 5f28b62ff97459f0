"""Checks who plays in a job, in seats and as opponents of evaluations: checkpoints (`seats.NAME.frozen`,
`validation.against`) and models behind URLs (`url`).

`kept_checkpoints.py` keeps each checkpoint in {data_dir}/jobs/{job}/start/seats/{checkpoint}. Nothing is asked of a
model's server: rollout workers do that, and connect by their own settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

from opentinker.services.scheduler.jobs.check_model import mistakes_in_model
from opentinker.services.scheduler.jobs.check_start_checkpoint import Mistakes, SourceCheckpoint, adapter_in, find
from opentinker.services.scheduler.jobs.disk_threads import on_disk
from opentinker.shared.data.dry_run import is_served
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.egress import Egress
from opentinker.shared.security.model_keys import key_problem, read_model_keys
from opentinker.shared.spec import JobSpec, ModelSpec, SeatSpec
from opentinker.shared.spec.evaluation import MAX_OPPONENTS, TWICE, OpponentSpec
from opentinker.shared.spec.matches.seats import MAX_SEATS, all_players
from opentinker.shared.spec.serving import MAX_LORA_RANK
from opentinker.shared.spec.start import Origin
from opentinker.shared.types.mistakes import mistake, right_parts, short, written

AGAINST = "validation.against."


class FrozenSeat(NamedTuple):
    source: SourceCheckpoint
    model: dict[str, Any]
    """[model] of the job that it is of, with the checkpoint's adapter."""


Found = Mapping[str, FrozenSeat]
"""By setting, `seats.NAME` or `validation.against.PLACE`, in the order of the spec."""


async def check_frozen_seats(
    ctx: Context, data: Any, spec: JobSpec | None, tenant: str
) -> tuple[Mistakes, dict[str, FrozenSeat]]:
    """Find the checkpoints, and check that they can play. `data`: the spec as it was sent."""
    mistakes: Mistakes = []
    found: dict[str, FrozenSeat] = {}
    known: dict[str, SourceCheckpoint | str] = {}
    for place, player in _written_players(data, spec).items():
        checkpoint = player.frozen
        if checkpoint is None:
            continue
        if checkpoint not in known:
            known[checkpoint] = await find(ctx, Origin.model_validate({"from": checkpoint}), tenant)
        chosen = known[checkpoint]
        if isinstance(chosen, str):
            mistakes.append(mistake(f"{place}.frozen", checkpoint, chosen))
            continue
        model, wrong = await on_disk(ctx, _judge, chosen, player, spec)
        opponents = [one.source.name for at, one in found.items() if at.startswith(AGAINST)]
        if place.startswith(AGAINST) and chosen.name in opponents:
            wrong.append(_wrong(player, f"is {chosen.name}; validation.against {TWICE}"))
        if model is not None:
            found[place] = FrozenSeat(chosen, model)
        mistakes += [{**one, "field": f"{place}.{one['field']}"} for one in wrong]
    return mistakes, found


def settle_player(plain: dict[str, Any], place: str, values: dict[str, Any]) -> None:
    """Set values of a player in a spec. `place`: as in `Found`."""
    table, _, entry = place.partition(".")
    players = plain["seats"] if table == "seats" else plain["validation"]["against"]
    players[entry if table == "seats" else int(place.removeprefix(AGAINST))] |= values


async def check_url_seats(ctx: Context, data: Any, spec: JobSpec | None, tenant: str) -> Mistakes:
    """Check that jobs may connect there, with that key. `data`: the spec as it was sent. Raises SpecError if the file
    with the keys cannot be read."""
    players = {place: player for place, player in _written_players(data, spec).items() if player.url is not None}
    if not players:
        return []
    mistakes: Mistakes = []
    egress = Egress(tuple(ctx.settings.env_egress_allow))
    names_keys = any(player.key is not None for player in players.values())
    keys = await on_disk(ctx, read_model_keys, ctx.settings.model_keys_file) if names_keys else {}
    known: dict[str, str] = {}
    for place, player in players.items():
        assert player.url is not None
        if player.url not in known:
            known[player.url] = await egress.refusal(player.url)
        if problem := known[player.url]:
            mistakes.append(mistake(f"{place}.url", player.url, problem))
        if player.key is not None and (problem := key_problem(keys, player.key, player.url, tenant)):
            mistakes.append(mistake(f"{place}.key", player.key, problem))
    return mistakes


def _written_players(data: Any, spec: JobSpec | None) -> Mapping[str, SeatSpec]:
    """Return the players of a spec by setting; of one that is wrong somewhere, those that are right in themselves, of
    the first MAX_SEATS and MAX_OPPONENTS."""
    if spec is not None:
        return all_players(spec)
    seats, opponents = written(data, "seats"), written(data, "validation", "against")
    listed = islice((seats if isinstance(seats, dict) else {}).items(), MAX_SEATS)
    against = (opponents if isinstance(opponents, list) else [])[:MAX_OPPONENTS]
    return {
        **right_parts(SeatSpec, {f"seats.{seat}": player for seat, player in listed}),
        **right_parts(OpponentSpec, {f"{AGAINST}{place}": player for place, player in enumerate(against)}),
    }


def _judge(chosen: SourceCheckpoint, player: SeatSpec, spec: JobSpec | None) -> tuple[dict[str, Any] | None, Mistakes]:
    """Blocking. Return the model of the checkpoint, and why it cannot play in this job."""
    try:
        lora = adapter_in(chosen)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, [_wrong(player, f"it cannot be read: {error}")]
    model = ModelSpec.model_validate({**chosen.job.spec["model"], "lora": lora})
    plain = model.model_dump(mode="json")
    wrong = []
    if player.model is not None and player.model != model:
        problem = f"is not that of {chosen.name}: leave it out"
        wrong.append(mistake("model", short(player.model), problem))
    if lora is not None and lora.rank > MAX_LORA_RANK:
        wrong.append(_wrong(player, f"its adapter has rank {lora.rank}, and vLLM serves {MAX_LORA_RANK} at most"))
    if spec is None:
        return plain, wrong
    weights = any(name.endswith(".safetensors") and "/" not in name for name in chosen.manifest.files)
    if is_served(spec) and not weights:
        problem = "it holds no weights (learner = 'simulated'): only rollout.engine = 'toy' plays it"
        wrong.append(_wrong(player, problem))
    for one in mistakes_in_model(model.base, model, is_served(spec) and lora is not None):
        wrong.append(_wrong(player, f"its {one['field']}, {one['value']}, {one['problem']}"))
    if spec.environment.tools and model.chat_template == "plain":
        wrong.append(_wrong(player, "its model.chat_template is 'plain', which cannot tell it of environment.tools"))
    return plain, wrong


def _wrong(player: SeatSpec, problem: str) -> dict[str, Any]:
    return mistake("frozen", player.frozen, problem)
