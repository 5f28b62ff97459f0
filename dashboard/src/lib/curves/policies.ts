// Jobs with several policies: what each of them says, and their curves side by side.
//
// Metrics of a policy are named POLICY/METRIC and come from a source `trainer~POLICY`; those of workers are of all policies.

import type { Panel } from "./panels.ts";
import { began, names, type Axis, type Line, type Metrics } from "./series.ts";
import type { Job, JobDetail, Point } from "../types.ts";

const MARK = "~";
export const ALL = "";
/** Places among the colours of charts, in an order that keeps them apart for people who see fewer colours. */
const OWN_COLOURS = [0, 4, 3, 7, 6];
/** Colours of what belongs to no policy. */
const SHARED_COLOURS = [1, 2, 5];

export interface Parts {
  /** By name, in the order of names; empty of a job with one policy. */
  own: Map<string, Metrics>;
  /** What belongs to none of them. */
  shared: Metrics;
}

const bare = new WeakMap<Point, Point>();
const made = new WeakMap<object, { version: number; parts: Parts }>();

/** The policy that a source speaks of; empty: of none. */
export function policyOf(source: string): string {
  const at = source.indexOf(MARK);
  return at < 0 ? "" : source.slice(at + 1);
}

/** Splits a job's points by policy, their metrics under the names that they have in a job with one. */
export function partsOf(joined: Metrics & { version: number }): Parts {
  const before = made.get(joined);
  if (before?.version === joined.version) return before.parts;
  const found = new Map<string, Map<string, Point[]>>();
  const rest = new Map<string, readonly Point[]>();
  for (const [source, points] of joined.sources) {
    const policy = policyOf(source);
    if (!policy) rest.set(source, points);
    else found.set(policy, (found.get(policy) ?? new Map()).set(source, points.map((point) => stripped(point, policy))));
  }
  const first = began(joined);
  const own = new Map([...found.keys()].sort().map((name) => [name, { sources: found.get(name)!, began: first }]));
  const leader = [...own.values()][0];
  const clock = leader && [...leader.sources.values()].flat();
  const parts = { own, shared: { sources: rest, began: first, ...(clock ? { clock } : {}) } };
  made.set(joined, { version: joined.version, parts });
  return parts;
}

function stripped(point: Point, policy: string): Point {
  let found = bare.get(point);
  if (!found) {
    const own = `${policy}/`;
    const values = Object.entries(point.values).map(([name, value]) => [name.startsWith(own) ? name.slice(own.length) : name, value]);
    bare.set(point, (found = { ...point, values: Object.fromEntries(values) }));
  }
  return found;
}

/** Every name that can be drawn, as a job with one policy has it. */
export function namesOf(joined: Metrics & { version: number }): string[] {
  const { own, shared } = partsOf(joined);
  return [...new Set([shared, ...own.values()].flatMap((part) => [...names(part).keys()]))].sort();
}

/** A panel's lines: of one policy, or of all with the same colour for a policy in every chart. */
export function linesOf(panel: Panel, joined: Metrics & { version: number }, axis: Axis, policy = ALL): Line[] {
  const { own, shared } = partsOf(joined);
  if (!own.size) return panel.lines(joined, axis);
  const beside = panel.lines(shared, axis);
  const one = own.get(policy);
  if (one) return [...panel.lines(one, axis), ...beside];
  const drawn = [...own.values()].map((part) => panel.lines(part, axis).filter((line) => line.x.length));
  const kinds = [...new Set(drawn.flat().map((line) => line.label))];
  const several = kinds.length > 1 || beside.some((line) => line.x.length);
  const ofPolicies = [...own.keys()].flatMap((name, place) =>
    drawn[place]!.map(({ low: _low, high: _high, ...line }) => ({
      ...line,
      label: several ? `${name} ${line.label}` : name,
      colour: OWN_COLOURS[place % OWN_COLOURS.length]!,
      pattern: kinds.length > 1 ? kinds.indexOf(line.label) : Math.floor(place / OWN_COLOURS.length),
    })),
  );
  const coloured = beside.map((line, place) => ({ ...line, colour: SHARED_COLOURS[place % SHARED_COLOURS.length]! }));
  return [...ofPolicies, ...coloured];
}

/** One policy of a job, as checkpoints are named; of a job with one, itself. */
export function partOf(job: string, policy: string): string {
  return policy ? `${job}${MARK}${policy}` : job;
}

/** Names of the policies of a job with several. */
export function policiesOf(job: JobDetail): string[] {
  return Object.keys(job.policies ?? {});
}

export interface Advance {
  policy: string;
  step: number;
  steps: number;
}

/** How far each policy is. Its step is that of the newest of its points. */
export function advances(job: JobDetail, joined: Metrics): Advance[] {
  const newest = (policy: string): number => {
    const points = joined.sources.get(`trainer${MARK}${policy}`);
    return Math.max(job.metrics[`trainer${MARK}${policy}`]?.step ?? 0, points?.[points.length - 1]?.step ?? 0);
  };
  return policiesOf(job).map((policy) => ({ policy, step: newest(policy), steps: stepsOf(job, policy) }));
}

function stepsOf(job: JobDetail, policy: string): number {
  const spec = job.spec as { train?: { steps?: number }; policies?: Record<string, { train?: { steps?: number } }> };
  return spec.policies?.[policy]?.train?.steps ?? spec.train?.steps ?? job.steps;
}

/** The trainer's last report, as pairs of a name and a number; of several policies, of each. */
export function reported(job: Pick<Job, "progress">): [string, number][] {
  const numbers = (of: object, prefix = ""): [string, number][] =>
    Object.entries(of).flatMap(([name, value]) => (typeof value === "number" && name !== "step_seconds" ? [[`${prefix}${name}`, value]] : []));
  const { policies } = job.progress;
  if (typeof policies !== "object") return numbers(job.progress).slice(0, 2);
  return Object.entries(policies).flatMap(([policy, own]) => numbers(own, `${policy} `).slice(0, 1));
}
