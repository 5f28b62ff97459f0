// How long a job will go on.

import type { Job } from "../types.ts";

/** At the pace of its last steps or, of a job that says none and has started once, of all of them since its start. Null:
 * it does not run, or nothing is known. */
export function secondsLeft(job: Pick<Job, "state" | "step" | "steps" | "since" | "epoch" | "progress">, now: number): number | null {
  if (job.state !== "running" || !job.steps) return null;
  const since = job.epoch === 1 && job.step > 0 ? (now - job.since) / job.step : null;
  const said = "step_seconds" in job.progress ? job.progress["step_seconds"] : undefined;
  const pace = typeof said === "number" ? said : since;
  return pace === null ? null : pace * Math.max(0, job.steps - job.step);
}
