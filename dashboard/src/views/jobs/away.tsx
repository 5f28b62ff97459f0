// "While you were away": what has ended, and which alarms rang, since this browser last showed the page.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useAsked } from "../../hooks.ts";
import { ask, job as path } from "../../lib/api.ts";
import { alarmsSince, happenedSince, LOOKED_AT, lastLook, looked, type Happened } from "../../lib/jobs/away.ts";
import type { Event, Job, SweepSummary } from "../../lib/types.ts";
import { ago } from "../../lib/words.ts";
import { State } from "../../parts.tsx";

const SEEN_MS = 60_000;

export function Away(): JSX.Element | null {
  const [since, setSince] = useState(() => lastLook(Date.now() / 1000));
  useEffect(() => {
    const look = (): void => looked(Date.now() / 1000);
    const timer = setInterval(() => document.visibilityState === "visible" && look(), SEEN_MS);
    document.addEventListener("visibilitychange", look);
    look();
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }, []);
  const jobs = useAsked<{ jobs: Job[] }>(since ? "/v1/jobs?sort=updated&limit=200" : null).value;
  const sweeps = useAsked<{ sweeps: SweepSummary[] }>(since ? "/v1/sweeps?limit=100" : null).value;
  const alarms = useAlarms(since, jobs?.jobs);
  if (!since || !jobs || !sweeps) return null;
  const found = [...happenedSince(since, jobs.jobs, sweeps.sweeps), ...alarms].sort((a, b) => b.time - a.time);
  if (!found.length) return null;
  return (
    <details class="card away" open>
      <summary>
        Since your last visit ({ago(since)}): {told(found)}{" "}
        <button class="plain" onClick={() => setSince(null)}>
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

/** Alarms of the jobs that changed last. */
function useAlarms(since: number | null, jobs: Job[] | undefined): Happened[] {
  const [alarms, setAlarms] = useState<Happened[]>([]);
  useEffect(() => {
    if (!since || !jobs) return;
    const changed = jobs.filter((job) => !job.finished || job.finished > since).slice(0, LOOKED_AT);
    const one = async (job: Job): Promise<Happened[]> => {
      const { events } = await ask<{ events: Event[] }>(path(job.id, `/events?format=json&after=${Math.floor(since * 1000)}-0`));
      return alarmsSince(since, job, events);
    };
    void Promise.allSettled(changed.map(one)).then((all) => setAlarms(all.flatMap((each) => (each.status === "fulfilled" ? each.value : []))));
  }, [since, jobs]);
  return alarms;
}

/** "2 succeeded, 1 failed". */
function told(found: Happened[]): string {
  const states = [...new Set(found.map((one) => one.state))];
  return states.map((state) => `${found.filter((one) => one.state === state).length} ${state}`).join(", ");
}
