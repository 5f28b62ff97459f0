// The checkpoints of all jobs: their lineage as links, and several compared by their evaluations.

import { directionOf, winners } from "../compare/direction.ts";
import { resultRows } from "./results.ts";
import type { RegisteredCheckpoint } from "../types.ts";

export interface Cell {
  value: number;
  interval: [number, number] | null;
}

export interface MetricRow {
  name: string;
  /** One per checkpoint; null: no evaluation of it has the metric. */
  cells: (Cell | null)[];
  /** Places of the best cells; none where fewer than two differ. */
  best: number[];
}

/** A row per metric over the evaluations of these checkpoints in a setting. */
export function metricRows(checkpoints: RegisteredCheckpoint[], setting: string): MetricRow[] {
  const columns = checkpoints.map((one) => cellsOf(one, setting));
  const all = Object.assign({}, ...columns.map((values) => Object.fromEntries(values))) as Record<string, Cell>;
  const names = resultRows(Object.fromEntries(Object.entries(all).map(([name, cell]) => [name, cell.value]))).map((row) => row.name);
  return names.map((name) => {
    const cells = columns.map((values) => values.get(name) ?? null);
    return { name, cells, best: winners(cells.map((cell) => cell?.value ?? null), directionOf(name)) };
  });
}

/** Of the evaluation that counts; the server chooses it. */
function cellsOf(one: RegisteredCheckpoint, setting: string): Map<string, Cell> {
  const evaluation = one.evaluations[one.compared[setting] ?? -1];
  return new Map(resultRows(evaluation?.values ?? {}).map(({ name, value, interval }) => [name, { value, interval }]));
}

/** The settings of these checkpoints' evaluations, those of most checkpoints first. */
export function settingsOf(checkpoints: RegisteredCheckpoint[]): string[] {
  const counts = new Map<string, number>();
  for (const one of checkpoints) for (const setting of Object.keys(one.compared)) counts.set(setting, (counts.get(setting) ?? 0) + 1);
  return [...counts.keys()].sort((one, other) => counts.get(other)! - counts.get(one)! || (one < other ? -1 : 1));
}

export interface Link {
  text: string;
  /** Address behind the #; null: the base model. */
  to: string | null;
}

/** The base model, then a link to the checkpoints of each job from which training continued. */
export function lineageLinks(lineage: string[]): Link[] {
  return lineage.map((text, place) => ({ text, to: place ? `/jobs/${jobOf(text)}/checkpoints` : null }));
}

/** The job of JOB@STEP or JOB~POLICY@STEP. */
function jobOf(checkpoint: string): string {
  return checkpoint.split(/[~@]/)[0]!;
}
