// Evaluation episodes of two runs, or of two policies, that have the same beginning.

import { partOf } from "../curves/policies.ts";
import type { Run } from "./compare.ts";
import { policiesIn } from "./policies.ts";

/** A run, or one policy of it: what has evaluation episodes. */
export interface Side {
  /** In an address: JOB or JOB~POLICY. */
  at: string;
  job: string;
  policy: string;
  text: string;
}

export function sidesOf(runs: Run[]): Side[] {
  return runs.flatMap((run) => {
    const policies = policiesIn(run.spec);
    return (policies.length ? policies : [""]).map((policy) => ({
      at: partOf(run.id, policy),
      job: run.id,
      policy,
      text: [run.name, run.id, policy].filter(Boolean).join(" "),
    }));
  });
}

/** The two that an address names; else the first, and the same policy of another run. Null: there are no two. */
export function chosenSides(all: Side[], named: string): [Side, Side] | null {
  const [one, other] = named.split(",").map((at) => all.find((side) => side.at === at));
  const left = one ?? all[0];
  const rest = all.filter((side) => side.job !== left?.job);
  const right = other ?? rest.find((side) => side.policy === left?.policy) ?? rest[0] ?? all.find((side) => side !== left);
  return left && right ? [left, right] : null;
}

interface Played {
  index: number;
  state?: number;
  sample?: number;
  opponent?: string;
  messages: { role: string; content: string }[];
}

/** The first episode of each beginning that both have played, in order; where one of them has met several opponents, those against the same one. */
export function pairs<T extends Played>(left: T[], right: T[]): [T, T][] {
  const several = [left, right].some((side) => new Set(side.map((one) => one.opponent)).size > 1);
  const key = (one: T): string => JSON.stringify([beginning(one), several ? one.opponent : null]);
  const others = new Map(firsts(right).map((one) => [key(one), one]));
  return firsts(left).flatMap((one): [T, T][] => {
    const other = others.get(key(one));
    return other && asked(one) === asked(other) ? [[one, other]] : [];
  });
}

function firsts<T extends Played>(episodes: T[]): T[] {
  return episodes.filter((one) => (one.sample ?? 0) === 0);
}

function beginning(one: Played): number {
  return one.state ?? one.index;
}

/** What the model was first asked: other rows may have the same number. */
function asked(one: Played): string {
  const first = one.messages.findIndex((message) => message.role === "assistant");
  return JSON.stringify(one.messages.slice(0, first < 0 ? undefined : first).map(({ role, content }) => [role, content]));
}
