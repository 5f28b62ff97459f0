// What the page says of a sweep's trials.

import type { Sweep, SweepTrial } from "./types.ts";
import { short } from "./words.ts";

/** What a comparison is grouped by where there are seeds. */
export const BUT_SEEDS = "settings";
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

/** The values of the finished trials in the order in which they ended, and the best one so far after each. */
export function progress(sweep: Pick<Sweep, "goal" | "all_trials">): { values: number[]; best: number[] } {
  const better = sweep.goal === "minimize" ? Math.min : Math.max;
  const ended = sweep.all_trials
    .filter((trial) => trial.state === "finished" && trial.value !== null && trial.finished !== null)
    .sort((a, b) => a.finished! - b.finished! || a.number - b.number);
  const values = ended.map((trial) => trial.value!);
  const best: number[] = [];
  for (const value of values) best.push(best.length ? better(best[best.length - 1]!, value) : value);
  return { values, best };
}

/** "0.91 of trial 3: lr 1e-4, group_size 8"; empty: there is none yet. */
export function bestText(sweep: Pick<Sweep, "best">): string {
  if (!sweep.best) return "";
  const { number, value, settings } = sweep.best;
  const paths = Object.keys(settings);
  return `${short(value)} of trial ${number}: ${paths.map((path) => `${lastName(path, paths)} ${settingText(settings[path])}`).join(", ")}`;
}

/** The last part of a setting's path, or all of it where two share that. */
export function lastName(path: string, paths: string[]): string {
  const last = (one: string): string => one.slice(one.lastIndexOf(".") + 1);
  return paths.filter((one) => last(one) === last(path)).length > 1 ? path : last(path);
}

/** As the command line has it: with four digits, which tell the trials of a search apart. */
export function settingText(value: unknown): string {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
  return typeof value === "string" ? value : (JSON.stringify(value) ?? "");
}

/** Where these jobs are compared: with several seeds, the mean of each configuration. */
export function comparisonOf(sweep: Pick<Sweep, "all_trials">, jobs: string[]): string {
  const hasSeeds = sweep.all_trials.some((trial) => trial.jobs.length > 1);
  return `/compare/${jobs.join()}${hasSeeds ? `/${encodeURIComponent(`by=${BUT_SEEDS}`)}` : ""}`;
}

/** A job's seed and value, in a trial with several seeds: ` (seed 2: 0.48)`. */
export function seedText(job: SweepTrial["jobs"][number]): string {
  if (job.seed === null) return "";
  return ` (seed ${job.seed}${job.value === null ? "" : `: ${short(job.value)}`})`;
}
