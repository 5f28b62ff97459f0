// Which way a metric is better, by its name, and who is best in it. docs/metrics.md has the names.

/** Whether more is better, or less; null: neither, or nobody can tell, as of an environment's own metrics. */
export type Direction = "rises" | "falls" | null;

const RISES = [
  /^reward(\/(mean|min|max|own|env\/.+|against\/.+))?$/,
  /^task\/.+\/(reward|exact|accuracy|pass\/\d+)$/,
  /^reward_model\/.+\/mean$/,
  /^(rewards\/)?(accuracy|margin)$/,
  /^(exact|solved|success|wins|rating)$/,
  /^(pool\/[^/]+\/)?winrate(\/.+)?$/,
  /^pass\/\d+$/,
  /^teacher\/logprob$/,
  /(^|\/)explained_variance$/,
  /_per_s$/,
];
const FALLS = [
  /^(models\/.+\/)?loss$/,
  /^perplexity$/,
  /^teacher\/(kl|k3)$/,
  /(^|\/)mismatch(\/(mean|max))?$/,
  /^(failed|missing|losses|tool_errors|zero_variance|turns\/untrainable)$/,
  /^(dropped|failed|env\/tool_errors)\/.+$/,
  /(^|\/)(seconds|wait_share)$/,
  /_(s|ms|seconds)$/,
];

export function directionOf(metric: string): Direction {
  const name = metric.replace(/^val\//, "").replace(/\/(low|high)$/, ""); // the ends of an interval are better where its middle is
  if (RISES.some((one) => one.test(name))) return "rises";
  return FALLS.some((one) => one.test(name)) ? "falls" : null;
}

/** The places of the best values; none where no direction is known, or where all are the same. */
export function winners(values: (number | null)[], direction: Direction): number[] {
  const known = values.filter((value) => value !== null);
  if (direction === null || new Set(known).size < 2) return [];
  const best = known.reduce((one, other) => (direction === "falls" ? Math.min(one, other) : Math.max(one, other)));
  return values.flatMap((value, place) => (value === best ? [place] : []));
}
