// What has happened since somebody last looked at this page, in this browser.

import type { Job, SweepSummary } from "./types.ts";

const KEPT = "opentinker-seen";
/** A shorter absence is none: a reload, a look at another tab. */
const SHORT_S = 300;

export interface Happened {
  /** Address behind the #. */
  at: string;
  name: string;
  state: string;
  reason: string;
  time: number;
}

/** Jobs and sweeps that have ended since then, the newest first. */
export function happenedSince(since: number, jobs: Job[], sweeps: SweepSummary[]): Happened[] {
  const inSweeps = new Set(sweeps.map((one) => one.id));
  const alone = jobs.filter((job) => !job.tags.some((tag) => inSweeps.has(tag))); // a sweep's jobs are told by the sweep
  const ended = [
    ...alone.map((job) => ({ ...job, at: `#/jobs/${job.id}` })),
    ...sweeps.map((sweep) => ({ ...sweep, at: `#/sweeps/${sweep.id}` })),
  ];
  return ended
    .flatMap(({ at, name, state, reason, finished }) => (finished && finished > since ? [{ at, name, state, reason, time: finished }] : []))
    .sort((a, b) => b.time - a.time);
}

/** Unix seconds of the last look before this one; null: there was none, or it was a moment ago. */
export function lastLook(now: number, kept = localStorage.getItem(KEPT)): number | null {
  const since = Number(kept ?? "");
  return since > 0 && now - since > SHORT_S ? since : null;
}

export function looked(now: number): void {
  localStorage.setItem(KEPT, String(Math.round(now)));
}
