// Metrics of jobs with several policies, which are named POLICY/METRIC, beside those of others.

import type { Json } from "../types.ts";

const FIRST = ["reward/mean", "val/reward/mean", "exact", "loss", "entropy"];
/** Charts at first, of jobs with one policy and with several. */
const MOST = { kinds: 4, charts: 8 };

/** Names of a spec's policies; none of a job with one. */
export function policiesIn(spec: Json): string[] {
  const policies = typeof spec === "object" && spec !== null && !Array.isArray(spec) ? spec["policies"] : null;
  return typeof policies === "object" && policies !== null ? Object.keys(policies) : [];
}

/** A metric under the name that it has in a job with one policy. */
export function bareName(metric: string, policies: readonly string[]): string {
  const at = metric.indexOf("/");
  return at > 0 && policies.includes(metric.slice(0, at)) ? metric.slice(at + 1) : metric;
}

/** What is shown before anybody has chosen: each of the usual metrics that there is, of all policies. */
export function firstMetrics(names: readonly string[], policies: readonly string[]): string[] {
  const found = FIRST.map((first) => names.filter((name) => bareName(name, policies) === first).sort()).filter((own) => own.length);
  return found.slice(0, MOST.kinds).flat().slice(0, MOST.charts);
}
