// The timeline of a job: parts of workers become rows, one per worker and lane, and shares of a window of time.

import { Heard } from "../live/join.ts";
import { FINAL, type Job } from "../types.ts";

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
  /** Rows of one do the same: a lane's, but that of environments is two, those who play them and those who wait. */
  group: string;
  /** By their start. */
  segments: Segment[];
  /** The rows that it stands for. */
  of?: Row[];
}

/** Of this time of a worker messages are missing: what it did nobody can say. */
export interface Hole {
  worker: string;
  from: number;
  to: number;
}

/** A segment that somebody has chosen. */
export interface Picked {
  row: Row;
  segment: Segment;
}

const ORDER = ["training", "generation", "env", "play", "reference", "swap", "loading"];
/** What env workers do, on the lane on which rollout workers say that they wait for it. */
const PLAY = new Set(["open", "turn"]);
const KEEP_S = 3600;
/** What is no work, though something goes on. */
export const IDLE = new Set(["wait", "queue", "tickets", "exams", "weights", "store"]);

const MOST_S = 7 * 86_400;

/** How many seconds back from now to ask for: an hour, of a job that is over its last. */
export function lookBack(job: Pick<Job, "state" | "finished">, now: number): number {
  const since = FINAL.includes(job.state) ? Math.max(0, Math.ceil(now - (job.finished ?? now))) : 0;
  return Math.min(MOST_S, since + KEEP_S);
}

export class Lanes extends Heard {
  readonly rows: Row[] = [];
  leftOut = 0;
  /** By worker and incarnation: the parts by their number. */
  private readonly parts = new Map<string, Map<number, Segment[]>>();

  /** Whether it is new. */
  add(part: Part): boolean {
    if (!this.note(part.worker, part.incarnation, part.seq)) return false;
    this.partsOf(part.worker, part.incarnation).set(part.seq, part.segments);
    this.leftOut += part.left_out;
    for (const segment of part.segments) {
      const { segments } = this.row(part.worker, segment);
      let at = segments.length;
      while (at > 0 && segments[at - 1]!.start > segment.start) at -= 1;
      segments.splice(at, 0, segment);
    }
    return true;
  }

  /** From the end of the part before a gap to what begins first after that: at most, for it may have been idle too. */
  holes(): Hole[] {
    const found: Hole[] = [];
    for (const gap of this.between()) {
      const parts = this.partsOf(gap.source, gap.incarnation);
      const before = parts.get(gap.from - 1);
      const after = parts.get(gap.to + 1);
      if (!before?.length || !after?.length) continue; // too old
      const from = Math.max(...before.map((one) => one.end));
      const starts = after.map((one) => one.start).filter((start) => start >= from);
      const to = starts.length ? Math.min(...starts) : Math.max(...after.map((one) => one.end));
      if (to > from) found.push({ worker: gap.source, from, to });
    }
    return found;
  }

  get end(): number {
    return Math.max(0, ...this.rows.map((row) => Math.max(0, ...row.segments.slice(-20).map((one) => one.end))));
  }

  /** Lets go of what is older than an hour, and of workers that have done nothing since. */
  forget(now: number): void {
    for (const row of this.rows) {
      let old = 0;
      while (old < row.segments.length && row.segments[old]!.end < now - KEEP_S) old += 1;
      if (old) row.segments.splice(0, old);
    }
    this.rows.splice(0, this.rows.length, ...this.rows.filter((row) => row.segments.length > 0));
    for (const parts of this.parts.values()) {
      for (const [seq, segments] of parts) if (segments.every((one) => one.end < now - KEEP_S)) parts.delete(seq);
    }
  }

  private partsOf(worker: string, incarnation: string): Map<number, Segment[]> {
    const id = `${worker}/${incarnation}`;
    let parts = this.parts.get(id);
    if (!parts) this.parts.set(id, (parts = new Map()));
    return parts;
  }

  private row(worker: string, { lane, kind }: Segment): Row {
    let row = this.rows.find((one) => one.worker === worker && one.lane === lane);
    if (!row) {
      this.rows.push((row = { worker, lane, group: lane === "env" && PLAY.has(kind) ? "play" : lane, segments: [] }));
      this.rows.sort((a, b) => place(a) - place(b) || a.group.localeCompare(b.group) || natural.compare(a.worker, b.worker));
    }
    return row;
  }
}

/** Of names with numbers in them. */
const natural = new Intl.Collator("en", { numeric: true });

function place(row: Row): number {
  const at = ORDER.indexOf(row.group);
  return at < 0 ? ORDER.length : at;
}

/** Those that touch the window. */
export function within(row: Row, from: number, to: number): Segment[] {
  return row.segments.filter((one) => one.end > from && one.start < to);
}

/** Whether it is of this worker, or stands for it too. */
export function isOf(row: Row, worker: string): boolean {
  return row.of ? row.of.some((one) => one.worker === worker) : row.worker === worker;
}

export function isSame(a: Picked | null, b: Picked | null): boolean {
  return (
    a?.row.group === b?.row.group &&
    a?.row.worker === b?.row.worker &&
    a?.segment.start === b?.segment.start &&
    a?.segment.kind === b?.segment.kind
  );
}

/** Share of what is known of the window in which something was done, however many at a time, and less where it was less
 * than one on average; waiting is nothing. Of many workers the mean. Null: nothing is known of it. */
export function busyShare(row: Row, from: number, to: number, holes: Hole[] = []): number | null {
  if (row.of) {
    const known = row.of.map((one) => busyShare(one, from, to, holes)).filter((one) => one !== null);
    return known.length ? known.reduce((a, b) => a + b) / known.length : null;
  }
  let busy = 0;
  let upTo = from;
  for (const one of within(row, from, to)) {
    if (IDLE.has(one.kind)) continue;
    const start = Math.max(one.start, upTo);
    const end = Math.min(one.end, to);
    if (end > start) {
      busy += (end - start) * Math.min(1, one.level);
      upTo = end;
    }
  }
  let known = to - from;
  for (const one of holes) if (one.worker === row.worker) known -= Math.max(0, Math.min(one.to, to) - Math.max(one.from, from));
  if (known < 1e-6) return busy > 0 ? 1 : null;
  return Math.min(1, busy / known);
}

/** The segment that lies at this time, or, within a reach, nearest to it. */
export function nearest(row: Row, time: number, reach: number): Segment | null {
  let best: Segment | null = null;
  let least = reach;
  for (const one of within(row, time - reach, time + reach)) {
    const away = Math.max(0, one.start - time, time - one.end);
    if (away <= least) [best, least] = [one, away];
  }
  return best;
}

/** Where an arrow key leads from what is chosen, among what the window shows; the newest one if nothing of it is. */
export function stepped(rows: Row[], from: number, to: number, picked: Picked | null, key: string): Picked | null {
  const shown = rows.map((row) => ({ row, segments: within(row, from, to) })).filter((one) => one.segments.length > 0);
  const at = picked ? shown.findIndex(({ row }) => row.group === picked.row.group && row.worker === picked.row.worker) : -1;
  const here = shown[at];
  const place = here && picked ? here.segments.findIndex((segment) => isSame({ row: here.row, segment }, picked)) : -1;
  if (!picked || !here || place < 0) {
    const first = here ?? shown[0];
    return first ? { row: first.row, segment: first.segments.at(-1)! } : null;
  }
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const next = here.segments[place + (key === "ArrowLeft" ? -1 : 1)];
    return next ? { row: here.row, segment: next } : picked;
  }
  const beside = shown[at + (key === "ArrowUp" ? -1 : 1)];
  if (!beside) return picked;
  const middle = (Math.max(from, picked.segment.start) + Math.min(to, picked.segment.end)) / 2;
  return { row: beside.row, segment: nearest(beside.row, middle, to - from) ?? beside.segments.at(-1)! };
}
