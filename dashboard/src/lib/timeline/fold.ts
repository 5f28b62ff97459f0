// Rows of the timeline as they are shown: where many workers are busy on one lane, they are one row until it is opened.

import { within, type Row, type Segment } from "./lanes.ts";

/** So many rows of a group are shown each for itself. */
export const FEW = 4;
/** Of a window; a folded row has a segment for each, and kind. */
const COLUMNS = 200;

/** More than a few rows of a group are one, unless the group is open. */
export function folded(rows: Row[], open: ReadonlySet<string>, from: number, to: number): Row[] {
  return [...grouped(rows)].flatMap(([group, of]) => (of.length <= FEW || open.has(group) ? of : [together(of, from, to)]));
}

/** Groups that can be folded. */
export function large(rows: Row[]): Set<string> {
  return new Set([...grouped(rows)].filter(([, of]) => of.length > FEW).map(([group]) => group));
}

function grouped(rows: Row[]): Map<string, Row[]> {
  const groups = new Map<string, Row[]>();
  for (const row of rows) {
    const of = groups.get(row.group);
    if (of) of.push(row);
    else groups.set(row.group, [row]);
  }
  return groups;
}

function together(of: Row[], from: number, to: number): Row {
  const { lane, group } = of[0]!;
  return { worker: `${of.length} workers`, lane, group, segments: summed(of, from, to), of };
}

/** What all do at a time, on average in each column. Columns lie still while the window moves over them. */
function summed(rows: Row[], from: number, to: number): Segment[] {
  const width = Math.max(1e-6, Number(((to - from) / COLUMNS).toFixed(6)));
  const first = Math.floor(from / width);
  const count = Math.ceil(to / width) - first;
  const kinds = new Map<string, { lane: string; busy: number[] }>();
  for (const row of rows) {
    for (const one of within(row, first * width, to)) {
      let sums = kinds.get(one.kind);
      if (!sums) kinds.set(one.kind, (sums = { lane: one.lane, busy: new Array<number>(count).fill(0) }));
      add(sums.busy, one, first, width, to);
    }
  }
  const found = [...kinds].flatMap(([kind, { lane, busy }]) =>
    busy.flatMap((seconds, i) => {
      const start = (first + i) * width;
      const end = Math.min(to, start + width);
      return seconds > 0 && end > start ? [{ lane, kind, start, end, version: "", level: seconds / (end - start) }] : [];
    }),
  );
  return found.sort((a, b) => a.start - b.start);
}

function add(busy: number[], one: Segment, first: number, width: number, to: number): void {
  const last = Math.min(busy.length - 1, Math.floor(one.end / width) - first);
  for (let i = Math.max(0, Math.floor(one.start / width) - first); i <= last; i += 1) {
    const start = (first + i) * width;
    busy[i]! += one.level * Math.max(0, Math.min(one.end, start + width, to) - Math.max(one.start, start));
  }
}
