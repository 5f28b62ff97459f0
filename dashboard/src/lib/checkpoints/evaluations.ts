// Evaluations of a job's weights as a table: a row each evaluation, a column each metric or category.

import { resultRows, type ResultRow } from "./results.ts";
import { policyOf } from "../curves/policies.ts";
import type { Evaluation, Point } from "../types.ts";

export type Columns = "metrics" | "categories";

export interface EvaluatedStep {
  step: number;
  /** The eval job; empty: an evaluation of the job itself, on its schedule. */
  job: string;
  setting: string;
  cells: (ResultRow | undefined)[];
}

export interface EvaluationTable {
  columns: string[];
  rows: EvaluatedStep[];
  /** Whether some evaluation has categories. */
  hasCategories: boolean;
}

export const MAX_COLUMNS = 8;
const FIRST = [/^reward\/mean$/, /^exact$/, /^pass\//, /^winrate/, /^rating$/];
/** Metrics that every evaluation has, and that say nothing of how good the weights are. */
const COUNTS = /^(reward\/|response_length\/|turns\/|ending\/|component\/|task\/|wins|draws|losses|rating\/|(episodes|failed|missing|tokens|seconds|signal)$)/;
const SOLVED = /^task\/(.+)\/pass\/1$/;

/** Newest step first. `points`: of the job's own evaluations; `policy`: whose, of a job with several. */
export function evaluationTable(evaluations: Evaluation[], points: Point[], policy: string, shown: Columns): EvaluationTable {
  const own = points.filter((one) => policyOf(one.source) === policy).map((one) => ({ step: one.step, job: "", setting: "", values: bare(one.values, policy) }));
  const newest = new Map(own.filter((one) => "val/episodes" in one.values || "val/loss" in one.values).map((one) => [one.step, one]));
  const others = evaluations.filter((one) => one.policy === policy && Object.keys(one.values).length > 0);
  const all = [...newest.values(), ...others].sort((a, b) => b.step - a.step || a.job.localeCompare(b.job));
  const found = all.map((one) => ({ ...one, byName: new Map(resultRows(one.values).map((row) => [row.name, row])) }));
  const names = new Set(found.flatMap((one) => [...one.byName.keys()]));
  const categories = [...names].filter((name) => SOLVED.test(name)).sort(byNumber);
  const columns = shown === "categories" ? categories : ordered([...names]).slice(0, MAX_COLUMNS);
  return {
    columns: columns.map((name) => name.replace(SOLVED, "$1")),
    rows: found.map(({ step, job, setting, byName }) => ({ step, job, setting, cells: columns.map((name) => byName.get(name)) })),
    hasCategories: categories.length > 0,
  };
}

function ordered(names: string[]): string[] {
  const rank = (name: string): number => FIRST.findIndex((one) => one.test(name)) >>> 0;
  return names.filter((name) => rank(name) < FIRST.length || !COUNTS.test(name)).sort((a, b) => rank(a) - rank(b) || byNumber(a, b));
}

function byNumber(a: string, b: string): number {
  return a.localeCompare(b, "en", { numeric: true });
}

function bare(values: Record<string, number>, policy: string): Record<string, number> {
  return policy ? Object.fromEntries(Object.entries(values).map(([name, value]) => [name.replace(`${policy}/`, ""), value])) : values;
}
