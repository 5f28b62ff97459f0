// What has happened since somebody last looked at this page, in this browser.

import type { Event, Job, SweepSummary } from "../types.ts";
import { short } from "../words.ts";

const KEPT = "opentinker-seen";
/** Since when there is something to tell that nobody has dismissed. */
const TOLD = "opentinker-away";
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

/** Whether a list, those that ended last first, stops before everything that has ended since then. */
export function isCut(since: number, ended: { finished: number | null }[], more: boolean): boolean {
  return more && (ended.at(-1)?.finished ?? 0) > since;
}

/** "2 succeeded, 1 failed". */
export function countsOf(found: Happened[]): string {
  const states = [...new Set(found.map((one) => one.state))];
  return states.map((state) => `${found.filter((one) => one.state === state).length} ${state}`).join(", ");
}

export interface Look {
  /** Unix seconds from which on things are told, until they are dismissed; null: there is nothing to tell. */
  since: number | null;
  /** Whether this look ends an absence. */
  returned: boolean;
}

/** Somebody looks now. An absence before it is remembered until it is dismissed: a reload or another view loses nothing. */
export function looked(now: number, kept: Pick<Storage, "getItem" | "setItem"> = localStorage): Look {
  const [last, told] = [Number(kept.getItem(KEPT) ?? ""), Number(kept.getItem(TOLD) ?? "")];
  const returned = last > 0 && now - last > SHORT_S;
  const since = told > 0 ? told : returned ? last : null;
  kept.setItem(KEPT, String(Math.round(now)));
  if (since !== null) kept.setItem(TOLD, String(since));
  return { since, returned };
}

export function dismissed(kept: Pick<Storage, "removeItem"> = localStorage): void {
  kept.removeItem(TOLD);
}
