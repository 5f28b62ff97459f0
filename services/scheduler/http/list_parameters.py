"""Query parameters of lists of jobs and of sweeps: filters, an order, the property of groups. `jobs/list_query.py`
reads them."""

from __future__ import annotations

from opentinker.services.scheduler.http.route_decorator import Choice, Parameter
from opentinker.services.scheduler.jobs.list_query import EQUAL, GROUPED, Listed
from opentinker.shared.state.list_rows import MOST_ROWS

OF_OWNER = " (id of the key, or name of the user)"
GROUP_BY = Choice("by", f"One of {', '.join(GROUPED)}.", among=("project", *(n for n in GROUPED if n != "project")))


def parameters_of(what: Listed) -> tuple[Parameter, tuple[Parameter, ...]]:
    """Return the order and the filters."""
    many = f"{what.noun}s"
    sort = Parameter(
        "sort",
        f"Order: {', '.join(what.orders)}; a leading - reverses it. By default the newest come first, by state the "
        f"running. Orders and filters look at the newest {MOST_ROWS:,} {many}.",
    )
    filters = (
        Parameter("state", f"Only {many} in one of these states, separated by commas: {', '.join(what.states)}."),
        Parameter("kind", f"Only {many} of one of these kinds, separated by commas: {', '.join(what.kinds)}."),
        Parameter("name", f"Only {many} with this text in their name."),
        Parameter("name_is", f"Only {many} of exactly this name."),
        Parameter("notes", f"Only {many} with this text in their notes."),
        Parameter("notes_is", f"Only {many} with exactly this first line of their notes."),
        *(Parameter(name, f"Only {many} with this {name}{OF_OWNER * (name == 'owner')}.") for name in EQUAL),
        Parameter("tag", f"Only {many} with this tag; with all of several, separated by commas."),
        Parameter(
            "search",
            f"Only {many} with all of these words in their id, name, kind, model, environment, project, tags, notes or "
            "owner.",
        ),
    )
    return sort, filters
