// Who wins how often against whom: the latest evaluations of each policy, by opponent.

import { partsOf } from "./policies.ts";
import { names, type Metrics } from "./series.ts";

const RATE = "val/winrate";

export interface Payoff {
  rate: number;
  /** Of its 95% interval, where there is one. */
  low: number | undefined;
  high: number | undefined;
  /** Step of the weights that played. */
  step: number;
}

export interface Payoffs {
  /** Who is evaluated; empty name: the job's one policy. */
  players: string[];
  /** Policies first. */
  opponents: string[];
  of: (player: string, opponent: string) => Payoff | undefined;
}

/** Opponents whose win rates are known. */
export function opponentsIn(part: Metrics): string[] {
  const found = [...names(part).keys()].flatMap((name) => {
    const opponent = name.startsWith(`${RATE}/`) ? name.slice(RATE.length + 1) : "";
    return opponent && !/(^|\/)(low|high)$/.test(opponent) ? [opponent] : [];
  });
  return found.sort();
}

/** Null where nothing was evaluated against opponents by name. */
export function payoffs(joined: Metrics & { version: number }): Payoffs | null {
  const { own } = partsOf(joined);
  const parts: [string, Metrics][] = own.size ? [...own] : [["", joined]];
  const found = new Map<string, Map<string, Payoff>>();
  for (const [player, part] of parts) {
    const row = new Map(opponentsIn(part).map((opponent) => [opponent, latest(part, opponent)] as const));
    if (row.size) found.set(player, row);
  }
  if (!found.size) return null;
  const all = new Set([...found.values()].flatMap((row) => [...row.keys()]));
  const policies = [...all].filter((name) => own.has(name)).sort();
  const others = [...all].filter((name) => !own.has(name)).sort();
  return { players: [...found.keys()], opponents: [...policies, ...others], of: (player, opponent) => found.get(player)?.get(opponent) };
}

function latest(part: Metrics, opponent: string): Payoff {
  const name = `${RATE}/${opponent}`;
  const points = [...part.sources.values()].flat().filter((point) => name in point.values);
  const { step, values } = points.reduce((newest, point) => (point.time >= newest.time ? point : newest));
  return { rate: values[name]!, low: values[`${name}/low`], high: values[`${name}/high`], step };
}
