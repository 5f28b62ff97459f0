// Live points and history become one: points are known by (source, incarnation, seq), whichever way they come, in
// whatever order and however often. What is missing between two of them is a gap.

import type { Point } from "../types.ts";

export interface Gap {
  source: string;
  incarnation: string;
  /** The first one that is missing, and the last. */
  from: number;
  to: number;
}

/** Whole numbers as sorted, disjoint, closed intervals. */
export class Numbers {
  readonly parts: [number, number][] = [];

  add(n: number): boolean {
    let at = this.parts.length;
    while (at > 0 && this.parts[at - 1]![0] > n) at -= 1; // nearly always the last
    const before = this.parts[at - 1];
    const after = this.parts[at];
    if (before && n <= before[1]) return false;
    const joinsBefore = before?.[1] === n - 1;
    const joinsAfter = after?.[0] === n + 1;
    if (joinsBefore && joinsAfter) {
      before![1] = after![1];
      this.parts.splice(at, 1);
    } else if (joinsBefore) before![1] = n;
    else if (joinsAfter) after![0] = n;
    else this.parts.splice(at, 0, [n, n]);
    return true;
  }
}

/** What has come of each incarnation of each source, what lies between, and what of that nobody has. */
export class Heard {
  private readonly seen = new Map<string, Numbers>();
  private readonly lost = new Map<string, Numbers>();

  /** Whether it is new. */
  note(source: string, incarnation: string, seq: number): boolean {
    return numbersOf(this.seen, nameOf(source, incarnation)).add(seq);
  }

  /** All that lies between. */
  between(): Gap[] {
    const found: Gap[] = [];
    for (const [name, { parts }] of this.seen) {
      const [source, incarnation] = name.split("\n") as [string, string];
      for (let i = 1; i < parts.length; i += 1) found.push({ source, incarnation, from: parts[i - 1]![1] + 1, to: parts[i]![0] - 1 });
    }
    return found;
  }

  /** What lies between, unless it was given up. */
  gaps(): Gap[] {
    return this.between().filter((gap) => !this.isLost(gap));
  }

  /** The history has it no more. */
  giveUp(gap: Gap): void {
    const numbers = numbersOf(this.lost, nameOf(gap.source, gap.incarnation));
    for (let n = gap.from; n <= gap.to; n += 1) numbers.add(n);
  }

  /** How many nobody has. */
  get missing(): number {
    let count = 0;
    for (const numbers of this.lost.values()) for (const [from, to] of numbers.parts) count += to - from + 1;
    return count;
  }

  private isLost(gap: Gap): boolean {
    return (this.lost.get(nameOf(gap.source, gap.incarnation))?.parts ?? []).some(([from, to]) => from <= gap.from && gap.to <= to);
  }
}

function nameOf(source: string, incarnation: string): string {
  return `${source}\n${incarnation}`;
}

function numbersOf(all: Map<string, Numbers>, name: string): Numbers {
  let numbers = all.get(name);
  if (!numbers) all.set(name, (numbers = new Numbers()));
  return numbers;
}

/** Of all sources: more than one tab should hold. */
export const MOST_POINTS = 100_000;

/** The points of one job. */
export class Joined extends Heard {
  /** By source, in the order of their time. */
  readonly sources = new Map<string, Point[]>();
  /** Counts changes, so that whoever draws knows whether to. */
  version = 0;
  /** Points that were let go: the oldest of whoever has said most. */
  forgotten = 0;
  private held = 0;

  /** Whether it is new. */
  add(point: Point): boolean {
    if (!this.note(point.source, point.incarnation, point.seq)) return false;
    let points = this.sources.get(point.source);
    if (!points) this.sources.set(point.source, (points = []));
    let at = points.length;
    while (at > 0 && points[at - 1]!.time > point.time) at -= 1;
    points.splice(at, 0, point);
    this.held += 1;
    if (this.held > MOST_POINTS) this.forget();
    this.version += 1;
    return true;
  }

  private forget(): void {
    const [longest] = [...this.sources.values()].sort((a, b) => b.length - a.length);
    const gone = longest!.splice(0, Math.ceil(longest!.length / 10)).length;
    this.held -= gone;
    this.forgotten += gone;
  }

  override giveUp(gap: Gap): void {
    super.giveUp(gap);
    this.version += 1;
  }
}

export function sizeOf(gaps: Gap[]): number {
  return gaps.reduce((sum, gap) => sum + gap.to - gap.from + 1, 0);
}
