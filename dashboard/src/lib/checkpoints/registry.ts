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

/** A row per metric over the evaluations of these checkpoints on an environment, by default on all; of several with the
 * metric the newest counts. */
export function metricRows(checkpoints: RegisteredCheckpoint[], environment: string | null = null): MetricRow[] {
  const columns = checkpoints.map((one) => newest(one, environment));
  const all = Object.assign({}, ...columns.map((values) => Object.fromEntries(values))) as Record<string, Cell>;
  const names = resultRows(Object.fromEntries(Object.entries(all).map(([name, cell]) => [name, cell.value]))).map((row) => row.name);
  return names.map((name) => {
    const cells = columns.map((values) => values.get(name) ?? null);
    return { name, cells, best: winners(cells.map((cell) => cell?.value ?? null), directionOf(name)) };
  });
}

function newest(one: RegisteredCheckpoint, environment: string | null): Map<string, Cell> {
  const found = new Map<string, Cell>();
  for (const evaluation of one.evaluations) {
    if (environment !== null && evaluation.environment !== environment) continue;
    for (const { name, value, interval } of resultRows(evaluation.values)) if (!found.has(name)) found.set(name, { value, interval });
  }
  return found;
}

/** Environments of these checkpoints' evaluations, by name; empty for rows of [data]. */
export function environmentsOf(checkpoints: RegisteredCheckpoint[]): string[] {
  return [...new Set(checkpoints.flatMap((one) => one.evaluations.map((found) => found.environment)))].sort();
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
