// By which metrics the list of checkpoints can be ordered.

import { directionOf } from "../compare/direction.ts";

/** The first to be offered. */
const USUAL = ["exact", "reward/mean", "pass/1", "loss"];
/** Orders of the server's own; a metric with such a name is asked for as val/NAME. */
const NO_METRICS = ["created", "step", "bytes"];

export type Order = [sort: string, text: string];

/** `metrics`: those that the server names. Best first, or both ways where nobody can tell which is better. `chosen` is
 * offered in any case. */
export function metricOrders(metrics: string[], chosen: string): Order[] {
  const known = [...metrics].sort((a, b) => rank(a) - rank(b)).flatMap(ordersOf);
  const name = chosen.replace(/^-/, "");
  if (NO_METRICS.includes(name) || known.some(([sort]) => sort === chosen)) return known;
  const metric = name.replace(/^val\//, "");
  const text = [...ordersOf(metric), ...bothWays(metric)].find(([sort]) => sort.startsWith("-") === chosen.startsWith("-"))![1];
  return [[chosen, text], ...known];
}

function rank(metric: string): number {
  const place = USUAL.indexOf(metric);
  return place >= 0 ? place : USUAL.length + (directionOf(metric) ? 0 : 1);
}

function ordersOf(metric: string): Order[] {
  const [highest, lowest] = bothWays(metric);
  const direction = directionOf(metric);
  if (direction === null) return [highest, lowest];
  return direction === "falls" ? [lowest] : [[highest[0], `by ${words(metric)}`]];
}

function bothWays(metric: string): [highest: Order, lowest: Order] {
  const sort = NO_METRICS.includes(metric) ? `val/${metric}` : metric;
  return [
    [sort, `by ${words(metric)}, highest first`],
    [`-${sort}`, `by ${words(metric)}, lowest first`],
  ];
}

function words(metric: string): string {
  return metric === "reward/mean" ? "mean reward" : metric.replace(/^pass\/(\d+)$/, "pass@$1");
}
