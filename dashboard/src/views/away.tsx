// "While you were away": what has ended since this browser last showed the page.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useAsked } from "../hooks.ts";
import { happenedSince, lastLook, looked, type Happened } from "../lib/away.ts";
import type { Job, SweepSummary } from "../lib/types.ts";
import { ago } from "../lib/words.ts";
import { State } from "../parts.tsx";

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
  if (!since || !jobs || !sweeps) return null;
  const found = happenedSince(since, jobs.jobs, sweeps.sweeps);
  if (!found.length) return null;
  return (
    <details class="card away" open>
      <summary>
        While you were away ({ago(since)}): {told(found)}{" "}
        <button class="plain" onClick={() => setSince(null)}>
          Dismiss
        </button>
      </summary>
      <ul class="plain">
        {found.map((one) => (
          <li key={one.at}>
            <State state={one.state} /> <a href={one.at}>{one.name}</a> <small class="dim">{ago(one.time)}</small> {one.reason}
          </li>
        ))}
      </ul>
    </details>
  );
}

/** "2 succeeded, 1 failed". */
function told(found: Happened[]): string {
  const states = [...new Set(found.map((one) => one.state))];
  return states.map((state) => `${found.filter((one) => one.state === state).length} ${state}`).join(", ");
}
