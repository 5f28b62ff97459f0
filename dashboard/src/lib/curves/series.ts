// Points become lines: a metric by step (what was rolled back is gone) or by time, rates of several workers summed.

import type { Point } from "../types.ts";

export type Axis = "step" | "time";

/** Points by source: all of a job, or those of one of its policies. */
export interface Metrics {
  readonly sources: ReadonlyMap<string, readonly Point[]>;
  /** Of a part of a job: time of the job's first point. */
  readonly began?: number;
  /** Of a part without a trainer: the points that say which step it had reached. */
  readonly clock?: readonly Point[];
}

export interface Line {
  label: string;
  x: number[];
  y: number[];
  /** Of a band around it. */
  low?: number[];
  high?: number[];
  /** Drawn as points: few and far between. */
  dots?: boolean;
  /** Never smoothed: a schedule, whose bends are the data. */
  exact?: boolean;
  /** Of another job, beside ours. */
  other?: boolean;
  /** Its place among the colours; without one, its place in the chart. */
  colour?: number;
  /** 0: drawn through; 1 and above: a pattern of dashes, so that it differs by more than its colour. */
  pattern?: number;
}

/** Every name that a source has said, with how often. */
export function names(joined: Metrics): Map<string, number> {
  const found = new Map<string, number>();
  for (const points of joined.sources.values())
    for (const point of points) for (const name in point.values) found.set(name, (found.get(name) ?? 0) + 1);
  return found;
}

/** By step or time, of every source that says it. A step that was trained again replaces the old one, and those after
 * it, which were rolled back. */
export function column(joined: Metrics, name: string, axis: Axis, take: (p: Point) => number | undefined): Line {
  const line: Line = { label: name, x: [], y: [] };
  const begun = began(joined);
  for (const points of joined.sources.values()) {
    for (const point of points) {
      const value = take(point);
      if (value === undefined) continue;
      const x = axis === "step" ? point.step : point.time - begun;
      while (axis === "step" && line.x.length && line.x[line.x.length - 1]! >= x) {
        line.x.pop();
        line.y.pop();
      }
      line.x.push(x);
      line.y.push(value);
    }
  }
  return line;
}

export function metric(joined: Metrics, name: string, axis: Axis): Line {
  return column(joined, name, axis, (point) => point.values[name]);
}

/** Time of the first point. */
export function began(joined: Metrics): number {
  if (joined.began !== undefined) return joined.began;
  let first = Infinity;
  for (const points of joined.sources.values()) if (points[0]) first = Math.min(first, points[0].time);
  return first;
}

const CELLS = 1500;

/** Of workers, each of which says it about once a second: their sum (or mean) in cells of time. By step: the one that
 * the trainer had reached then. */
export function together(joined: Metrics, name: string, axis: Axis, how: "sum" | "mean" = "sum"): Line {
  const line: Line = { label: name, x: [], y: [] };
  const sources = those(joined, name);
  if (!sources.length) return line;
  const { cell, x } = grid(joined, sources, axis);
  const cells = new Map<number, { sum: number; count: number }[]>();
  sources.forEach((points, source) => {
    for (const point of points) {
      const value = point.values[name];
      if (value === undefined) continue;
      const at = cell(point.time);
      let sums = cells.get(at);
      if (!sums) cells.set(at, (sums = []));
      const own = (sums[source] ??= { sum: 0, count: 0 });
      own.sum += value;
      own.count += 1;
    }
  });
  for (const at of [...cells.keys()].sort((a, b) => a - b)) {
    const means = cells.get(at)!.filter(Boolean).map((own) => own.sum / own.count);
    const total = means.reduce((sum, one) => sum + one, 0);
    line.x.push(x(at));
    line.y.push(how === "sum" ? total : total / means.length);
  }
  return line;
}

/** Of totals that workers count up: what one grew by, over what `parts` did, of all workers in cells of time. */
export function shareOf(joined: Metrics, name: string, parts: string[], axis: Axis): Line {
  const line: Line = { label: name, x: [], y: [] };
  const sources = those(joined, name);
  if (!sources.length) return line;
  const { cell, x } = grid(joined, sources, axis);
  const cells = new Map<number, { part: number; whole: number }>();
  for (const points of sources) {
    const before = new Map<string, [number, number]>(); // totals begin anew with each incarnation
    for (const { incarnation, time, values } of points) {
      const part = values[name];
      if (part === undefined) continue;
      const whole = parts.reduce((sum, each) => sum + (values[each] ?? 0), 0);
      const [part0, whole0] = before.get(incarnation) ?? [0, 0];
      before.set(incarnation, [part, whole]);
      if (part < part0 || whole < whole0) continue;
      const at = cell(time);
      const sum = cells.get(at) ?? { part: 0, whole: 0 };
      cells.set(at, { part: sum.part + part - part0, whole: sum.whole + whole - whole0 });
    }
  }
  for (const [at, { part, whole }] of [...cells].sort(([a], [b]) => a - b)) {
    if (whole <= 0) continue;
    line.x.push(x(at));
    line.y.push(part / whole);
  }
  return line;
}

/** Points of the sources that say it. */
function those(joined: Metrics, name: string): (readonly Point[])[] {
  return [...joined.sources.values()].filter((points) => points.some((p) => name in p.values));
}

/** Which cell a time lies in, and where a cell is drawn. */
function grid(joined: Metrics, sources: (readonly Point[])[], axis: Axis): { cell: (time: number) => number; x: (cell: number) => number } {
  const begun = began(joined);
  const last = Math.max(...sources.map((points) => points[points.length - 1]!.time));
  const size = Math.max(1, (last - begun) / CELLS);
  const reached = axis === "step" ? steps(joined) : null;
  const middle = (cell: number): number => (cell + 0.5) * size;
  return {
    cell: (time) => Math.floor((time - begun) / size),
    x: (cell) => (reached ? reached(begun + middle(cell)) : middle(cell)),
  };
}

/** Which step the trainer had reached, by time. */
function steps(joined: Metrics): (time: number) => number {
  const times: number[] = [];
  const at: number[] = [];
  for (const points of joined.clock ? [joined.clock] : joined.sources.values())
    for (const point of points)
      if ("step_seconds" in point.values || "train_seconds" in point.values) {
        times.push(point.time);
        at.push(point.step);
      }
  return (time) => {
    let low = 0;
    let high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle]! <= time) low = middle + 1;
      else high = middle;
    }
    return at[low - 1] ?? 0;
  };
}

/** Exponential moving average that begins without bias; 0: as it is. */
export function smoothed(y: readonly number[], weight: number): number[] {
  if (weight <= 0) return [...y];
  let mean = 0;
  let mass = 0;
  return y.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

/** The edges of a band for a logarithmic axis: what is not above 0 becomes the smallest value that is. */
export function clamped(edges: readonly number[][]): number[][] {
  const least = Math.min(...edges.flatMap((edge) => edge.filter((y) => y > 0)));
  return edges.map((edge) => edge.map((y) => (y > 0 || !Number.isFinite(least) ? y : least)));
}

/** All lines over the union of their x, as columns; null where a line has nothing. */
export function aligned(lines: readonly { x: number[]; ys: (number | null)[][] }[]): (number | null)[][] {
  const all = new Set<number>();
  for (const line of lines) for (const x of line.x) all.add(x);
  const xs = [...all].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const columns: (number | null)[][] = [xs];
  for (const line of lines)
    for (const ys of line.ys) {
      const column = new Array<number | null>(xs.length).fill(null);
      line.x.forEach((x, i) => (column[place.get(x)!] = ys[i] ?? null));
      columns.push(column);
    }
  return columns;
}
