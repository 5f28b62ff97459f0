// What has happened since somebody last looked at this page, in this browser.

import type { Event, Job, SweepSummary } from "../types.ts";
import { short } from "../words.ts";

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

/** Jobs whose alarms are asked for. */
export const LOOKED_AT = 20;
const ALARM = /_alarm$|^environment_down$/;

/** Alarms of a job since then: the newest of each kind. */
export function alarmsSince(since: number, job: Job, events: Event[]): Happened[] {
  const newest = new Map(events.filter((one) => one.time > since && ALARM.test(one.event)).map((one) => [one.event, one]));
  return [...newest.values()].map((one) => ({
    at: `#/jobs/${job.id}/log`,
    name: job.name,
    state: "alarm",
    reason: alarmText(one),
    time: one.time,
  }));
}

function alarmText(event: Event): string {
  const name = event.event.replaceAll("_", " ");
  const [metric, value, hint] = [event["metric"], event["value"], event["hint"]];
  if (typeof metric !== "string" || typeof value !== "number") return name;
  return `${name}: ${metric} is ${short(value)}${typeof hint === "string" ? `; ${hint}` : ""}`;
}

/** Unix seconds of the last look before this one; null: there was none, or it was a moment ago. */
export function lastLook(now: number, kept = localStorage.getItem(KEPT)): number | null {
  const since = Number(kept ?? "");
  return since > 0 && now - since > SHORT_S ? since : null;
}

export function looked(now: number): void {
  localStorage.setItem(KEPT, String(Math.round(now)));
}
