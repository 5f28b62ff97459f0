// A link that shows jobs to people without a key, for a time.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useDoing, useMay } from "../hooks.ts";
import { ask } from "../lib/api.ts";
import { Said, Select } from "../parts.tsx";

const DAY_S = 86400;
const TIMES: [string, string][] = [
  [String(DAY_S), "for a day"],
  [String(7 * DAY_S), "for a week"],
  [String(30 * DAY_S), "for a month"],
];

/** `at`: the view that the link opens; without it, this one. */
export function Share({ jobs, at }: { jobs: string[]; at?: string }): JSX.Element | null {
  const [seconds, setSeconds] = useState(TIMES[1]![0]);
  const [link, setLink] = useState("");
  const { doing, problem, act } = useDoing();
  if (!useMay("jobs:write")) return null;
  const make = (): void =>
    act(async () => {
      const made = await ask<{ key: string }>("/v1/shares", { method: "POST", body: { jobs, expires_in_s: Number(seconds) } });
      setLink(`${location.origin}/#/share/${made.key}${at ?? location.hash.slice(1)}`);
    });
  return (
    <details class="columns share">
      <summary>Share</summary>
      <div class="card">
        <p class="dim">Anyone with the link can see {jobs.length > 1 ? `these ${jobs.length} jobs` : "this job"} and nothing else, and can change nothing.</p>
        <div class="bar">
          <Select label="How long" value={seconds} of={TIMES} choose={setSeconds} />
          <button disabled={doing} onClick={make}>
            Make a link
          </button>
        </div>
        {link && <input aria-label="Link" readOnly value={link} onFocus={(event) => event.currentTarget.select()} />}
        <Said problem={problem} />
      </div>
    </details>
  );
}
