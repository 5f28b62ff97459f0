// The timeline of a job: parts of workers become rows, one per worker and lane, and shares of a window of time.

import { Numbers } from "./join.ts";
import { FINAL, type Job } from "./types.ts";

export interface Segment {
  lane: string;
  kind: string;
  start: number;
  end: number;
  version: string;
  level: number;
}

/** A worker's last second. */
export interface Part {
  worker: string;
  incarnation: string;
  seq: number;
  segments: Segment[];
  left_out: number;
}

export interface Row {
  worker: string;
  lane: string;
  /** By their start. */
  segments: Segment[];
}

const ORDER = ["training", "generation", "env", "reference", "swap"];
const KEEP_S = 3600;
/** What is no work, though something goes on. */
const IDLE = new Set(["wait"]);

const MOST_S = 7 * 86_400;

/** How many seconds back from now to ask for: an hour, of a job that is over its last. */
export function lookBack(job: Pick<Job, "state" | "finished">, now: number): number {
  const since = FINAL.includes(job.state) ? Math.max(0, Math.ceil(now - (job.finished ?? now))) : 0;
  return Math.min(MOST_S, since + KEEP_S);
}

export class Lanes {
  readonly rows: Row[] = [];
  leftOut = 0;
  private readonly seen = new Map<string, Numbers>();

  /** Whether it is new. */
  add(part: Part): boolean {
    const id = `${part.worker}/${part.incarnation}`;
    let numbers = this.seen.get(id);
    if (!numbers) this.seen.set(id, (numbers = new Numbers()));
    if (!numbers.add(part.seq)) return false;
    this.leftOut += part.left_out;
    for (const segment of part.segments) {
      const { segments } = this.row(part.worker, segment.lane);
      let at = segments.length;
      while (at > 0 && segments[at - 1]!.start > segment.start) at -= 1;
      segments.splice(at, 0, segment);
    }
    return true;
  }

  get end(): number {
    return Math.max(0, ...this.rows.map((row) => Math.max(0, ...row.segments.slice(-20).map((one) => one.end))));
  }

  /** Lets go of what is older than an hour. */
  forget(now: number): void {
    for (const row of this.rows) {
      let old = 0;
      while (old < row.segments.length && row.segments[old]!.end < now - KEEP_S) old += 1;
      if (old) row.segments.splice(0, old);
    }
  }

  private row(worker: string, lane: string): Row {
    let row = this.rows.find((one) => one.worker === worker && one.lane === lane);
    if (!row) {
      this.rows.push((row = { worker, lane, segments: [] }));
      this.rows.sort((a, b) => place(a) - place(b) || a.worker.localeCompare(b.worker));
    }
    return row;
  }
}

function place(row: Row): number {
  const at = ORDER.indexOf(row.lane);
  return at < 0 ? ORDER.length : at;
}

/** Those that touch the window. */
export function within(row: Row, from: number, to: number): Segment[] {
  return row.segments.filter((one) => one.end > from && one.start < to);
}

/** Share of the window in which something was done, however many at a time; waiting is nothing. */
export function busyShare(row: Row, from: number, to: number): number {
  let busy = 0;
  let upTo = from;
  for (const one of within(row, from, to)) {
    if (IDLE.has(one.kind)) continue;
    const start = Math.max(one.start, upTo);
    const end = Math.min(one.end, to);
    if (end > start) {
      busy += end - start;
      upTo = end;
    }
  }
  return to > from ? busy / (to - from) : 0;
}
