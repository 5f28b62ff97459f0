// What the page says of a sweep's trials.

import type { Sweep, SweepTrial } from "./types.ts";
import { short } from "./words.ts";

const ORDER = ["finished", "running", "stopped", "failed", "cancelled"];

/** A trial's value; while it runs, the mean of its jobs so far. */
export function trialValue(trial: SweepTrial): number | null {
  if (trial.value !== null) return trial.value;
  const values = trial.jobs.flatMap((job) => (job.value === null ? [] : [job.value]));
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** Finished trials by value, the best first; then those that run, and those that ended otherwise. */
export function ranked(sweep: Pick<Sweep, "goal" | "all_trials">): SweepTrial[] {
  const sign = sweep.goal === "minimize" ? 1 : -1;
  const rank = (trial: SweepTrial): number => sign * (trial.value ?? 0);
  return [...sweep.all_trials].sort(
    (a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || rank(a) - rank(b) || a.number - b.number,
  );
}

/** The last part of a setting's path, or all of it where two share that. */
export function lastName(path: string, paths: string[]): string {
  const last = (one: string): string => one.slice(one.lastIndexOf(".") + 1);
  return paths.filter((one) => last(one) === last(path)).length > 1 ? path : last(path);
}

export function settingText(value: unknown): string {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : short(value);
  return typeof value === "string" ? value : (JSON.stringify(value) ?? "");
}

/** A job's seed and value, in a trial with several seeds: ` (seed 2: 0.48)`. */
export function seedText(job: SweepTrial["jobs"][number]): string {
  if (job.seed === null) return "";
  return ` (seed ${job.seed}${job.value === null ? "" : `: ${short(job.value)}`})`;
}
