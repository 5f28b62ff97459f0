// "While you were away": what has ended, and which alarms rang, since this browser last showed the page; until it is dismissed.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useAsked } from "../../hooks.ts";
import { ask, job as path } from "../../lib/api.ts";
import { alarmsSince, countsOf, dismissed, happenedSince, isCut, LOOKED_AT, looked, type Happened } from "../../lib/jobs/away.ts";
import type { Event, Job, SweepSummary } from "../../lib/types.ts";
import { ago } from "../../lib/words.ts";
import { State } from "../../parts.tsx";

const SEEN_MS = 60_000;

export function Away(): JSX.Element | null {
  const [at, setAt] = useState(() => ({ since: looked(Date.now() / 1000).since, turn: 0 }));
  useEffect(() => {
    const look = (): void => {
      const { since, returned } = looked(Date.now() / 1000);
      setAt((before) => (returned || since !== before.since ? { since, turn: before.turn + 1 } : before));
    };
    const timer = setInterval(() => document.visibilityState === "visible" && look(), SEEN_MS);
    document.addEventListener("visibilitychange", look);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }, []);
  if (!at.since) return null;
  const dismiss = (): void => {
    dismissed();
    setAt({ since: null, turn: at.turn + 1 });
  };
  return <Missed key={at.turn} since={at.since} dismiss={dismiss} />;
}

function Missed({ since, dismiss }: { since: number; dismiss: () => void }): JSX.Element | null {
  const jobs = useAsked<{ jobs: Job[]; more: boolean }>("/v1/jobs?sort=finished&limit=200").value;
  const sweeps = useAsked<{ sweeps: SweepSummary[]; more: boolean }>("/v1/sweeps?sort=finished&limit=1000").value;
  const alarms = useAlarms(since);
  const found = jobs && sweeps && alarms && [...happenedSince(since, jobs.jobs, sweeps.sweeps), ...alarms.found].sort((a, b) => b.time - a.time);
  const isEmpty = found !== null && !found.length;
  useEffect(() => {
    if (isEmpty) dismissed(); // what happens from now on is seen as it happens
  }, [isEmpty]);
  if (!found?.length) return null;
  const partial = isCut(since, jobs!.jobs, jobs!.more) || isCut(since, sweeps!.sweeps, sweeps!.more) || alarms!.partial;
  return (
    <details class="card away" open>
      <summary>
        Since your last visit ({ago(since)}): {partial && "at least "}
        {countsOf(found)}{" "}
        <button class="plain" onClick={dismiss}>
          Dismiss
        </button>
      </summary>
      <ul class="plain">
        {found.map((one) => (
          <li key={`${one.at} ${one.state} ${one.time}`}>
            <State state={one.state} /> <a href={one.at}>{one.name}</a> <small class="dim">{ago(one.time)}</small> {one.reason}
          </li>
        ))}
      </ul>
    </details>
  );
}

interface Alarms {
  found: Happened[];
  /** Not all jobs were asked, or not all have answered. */
  partial: boolean;
}

/** Alarms of the jobs that changed last; null until they have answered. */
function useAlarms(since: number): Alarms | null {
  const jobs = useAsked<{ jobs: Job[]; more: boolean }>("/v1/jobs?sort=updated&limit=200").value;
  const [alarms, setAlarms] = useState<Alarms | null>(null);
  useEffect(() => {
    if (!jobs) return;
    const changed = jobs.jobs.filter((job) => !job.finished || job.finished > since);
    const one = async (job: Job): Promise<Happened[]> => {
      const { events } = await ask<{ events: Event[] }>(path(job.id, `/events?format=json&after=${Math.floor(since * 1000)}-0`));
      return alarmsSince(since, job, events);
    };
    void Promise.allSettled(changed.slice(0, LOOKED_AT).map(one)).then((all) =>
      setAlarms({
        found: all.flatMap((each) => (each.status === "fulfilled" ? each.value : [])),
        partial: changed.length > LOOKED_AT || all.some((each) => each.status === "rejected"),
      }),
    );
  }, [since, jobs]);
  return alarms;
}
