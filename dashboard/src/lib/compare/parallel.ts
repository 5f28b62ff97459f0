// Runs as lines across parallel axes: one axis for each setting that differs, and one for how the runs ended.

import { isWide } from "./axis.ts";
import { curve, differences, ending, type Run } from "./compare.ts";

export interface Axis {
  name: string;
  /** What stands at the ends, or at each place of an axis of words; `at` from 0 (below) to 1. */
  marks: { at: number; text: string }[];
}

export interface Strand {
  id: string;
  name: string;
  /** A height from 0 to 1 on each axis; null: the run has no value there. */
  at: (number | null)[];
  /** The metric from the worst (0) to the best (1) of these runs; null: it has none. */
  rank: number | null;
}

const MOST_AXES = 8;

/** `left`: settings that differ and have no axis. */
export function parallel(runs: Run[], metric: string, falls: boolean): { axes: Axis[]; strands: Strand[]; left: number } {
  const all = differences(runs.map((run) => run.spec));
  const settings = all.slice(0, MOST_AXES);
  const ends = runs.map((run) => ending(curve(run, metric))?.last);
  const columns = [...settings.map((one) => axisOf(one.path, one.values)), axisOf(metric, ends.map((end) => (end === undefined ? "" : String(end))))];
  const last = columns[columns.length - 1]!;
  return {
    axes: columns.map(({ axis }) => axis),
    left: all.length - settings.length,
    strands: runs.map((run, row) => {
      const height = last.at[row] ?? null;
      return { id: run.id, name: run.name, at: columns.map(({ at }) => at[row] ?? null), rank: height === null || !falls ? height : 1 - height };
    }),
  };
}

function axisOf(name: string, values: string[]): { axis: Axis; at: (number | null)[] } {
  const given = values.filter((value) => value !== "");
  const numbers = given.map(Number);
  if (numbers.some(Number.isNaN)) {
    const words = [...new Set(given)].sort();
    const place = (value: string): number => (words.length > 1 ? words.indexOf(value) / (words.length - 1) : 0.5);
    return {
      axis: { name, marks: words.map((text) => ({ at: place(text), text })) },
      at: values.map((value) => (value === "" ? null : place(value))),
    };
  }
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const scaled = isWide(low, high) ? Math.log : (value: number): number => value;
  const span = scaled(high) - scaled(low) || 1;
  const marks = low === high ? [{ at: 0.5, text: String(low) }] : [{ at: 0, text: String(low) }, { at: 1, text: String(high) }];
  return {
    axis: { name, marks: numbers.length ? marks : [] },
    at: values.map((value) => (value === "" ? null : low === high ? 0.5 : (scaled(Number(value)) - scaled(low)) / span)),
  };
}
