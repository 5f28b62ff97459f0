"""The load test of the whole service: one scenario, or all of them, on this machine.

    python -m loadtest [SCENARIO...] [--seconds 20] [--rate 50] [--jobs 24] [--url URL] [--out runs/loadtest]
                       [--save-baseline] [--tolerance X]

Starts `opentinker up` for each scenario, or loads the server at URL (this machine alone; the key as for `opentinker`).
Requests come at times drawn beforehand, whether or not earlier ones were answered. Writes SCENARIO.json, a page and
plots, compares with loadtest/baselines/SCENARIO.json (`--save-baseline` writes it) by ratio, and exits with 1 if
something does not hold that must, or a number is more than `--tolerance` times as bad as in the baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import orjson

from loadtest.scenarios.catalog import OWN, SCENARIOS
from loadtest.scenarios.jobs import Options
from loadtest.support.machine import Others
from loadtest.support.report import BASELINES, Report, lines, ratios, write
from opentinker.client import ApiError

SHOWN = ("seconds", "rate", "jobs", "seed")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    listing = "".join(f"\n  {name:13} {(run.__doc__ or '').strip()}" for name, run in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog="python -m loadtest",
        description=f"{__doc__}\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the loaded phase, at most 600")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second, at most 1000")
    parser.add_argument("--jobs", type=int, default=24, help="of scenarios with many, at most 1000")
    parser.add_argument("--seed", type=int, default=0, help="of arrival times")
    parser.add_argument("--url", help="a server on this machine that runs already")
    parser.add_argument("--out", type=Path, default=Path("runs/loadtest"))
    parser.add_argument("--save-baseline", action="store_true")
    parser.add_argument("--tolerance", type=float, help="fail if something is so many times as bad as the baseline")
    found = parser.parse_args(arguments)
    found.scenarios = found.scenarios or [name for name in SCENARIOS if found.url is None or name not in OWN]
    unknown = [name for name in found.scenarios if name not in SCENARIOS]
    if unknown:
        parser.error(f"no such scenario: {', '.join(unknown)}. There are: {', '.join(SCENARIOS)}")
    for name, most in (("seconds", 600.0), ("rate", 1000.0), ("jobs", 1000)):
        if not 0 < getattr(found, name) <= most:
            parser.error(f"--{name} must be above 0 and at most {most:g}")
    alone = [f"{name}: {OWN[name]}" for name in found.scenarios if name in OWN]
    if found.url is not None and alone:
        parser.error(f"{'; '.join(alone)}. Leave --url out")
    return found


async def run(name: str, chosen: argparse.Namespace) -> Report:
    asked = {field: getattr(chosen, field) for field in SHOWN}
    report = Report(name, asked)
    others, began = Others(), time.perf_counter()
    try:
        await SCENARIOS[name](Options(url=chosen.url, **asked), report)
    except (ApiError, TimeoutError) as error:
        raise SystemExit(f"{name}: {error}") from None
    report.foreign = others.stop()
    report.seconds = time.perf_counter() - began
    return report


def compared(report: Report, chosen: argparse.Namespace, baselines: Path = BASELINES) -> dict[str, float]:
    """By how much each number is worse than in the baseline; saves a new one if asked to."""
    path = baselines / f"{report.scenario}.json"
    if chosen.save_baseline:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(orjson.dumps(report.data(), option=orjson.OPT_INDENT_2))
        return {}
    if chosen.tolerance is not None and not path.exists():
        raise SystemExit(f"--tolerance: there is no {path} to compare with; --save-baseline makes it")
    worse = ratios(report.data(), orjson.loads(path.read_bytes())) if path.exists() else {}
    for name, times in worse.items():
        if chosen.tolerance is not None:
            report.check(
                f"{name} is at most {chosen.tolerance:g} times as bad", times <= chosen.tolerance, f"{times:.2f}"
            )
    return worse


def main() -> None:
    chosen = options()
    good = True
    for name in chosen.scenarios:
        report = asyncio.run(run(name, chosen))
        worse = compared(report, chosen)
        page = write(report, chosen.out, worse)
        print("\n".join([*lines(report.data(), worse), f"-> {page}", ""]), flush=True)
        good = good and report.good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
