// Which way a metric is better, by its name, and who is best in it. docs/metrics.md has the names. The patterns are those
// of shared/types/metric_directions.py, which sweeps use: change both.

/** Whether more is better, or less; null: neither, or nobody can tell, as of an environment's own metrics. */
export type Direction = "rises" | "falls" | null;

const RISES = [
  /^reward(\/(mean|min|max|own|(env|team|against)\/.+))?$/,
  /^task\/.+\/(reward|exact|accuracy|pass\/\d+)$/,
  /^reward_model\/.+\/mean$/,
  /^(rewards\/)?(accuracy|margin)$/,
  /^(exact|solved|success|rating)$/,
  /^wins(\/.+)?$/,
  /^(pool\/[^/]+\/)?winrate(\/.+)?$/,
  /^pass\/\d+$/,
  /^teacher\/logprob$/,
  /^(critic|value)\/explained_variance$/,
  /^(trainer|rollout|serving|reference|scheduler|env)\/([a-z]+_)?(tokens|episodes|groups|turns|steps|answers)_per_s$/,
];
const FALLS = [
  /^(models\/.+\/)?loss$/,
  /^perplexity$/,
  /^teacher\/(kl|k3)$/,
  /^((mismatch|drift)\/(mean|max)|swap\/mismatch)$/,
  /^(failed|missing|tool_errors|zero_variance|turns\/untrainable)$/,
  /^losses(\/.+)?$/,
  /^(dropped|failed|env\/tool_errors)\/.+$/,
  /^((step_|train_)?seconds|trainer\/wait_share)$/,
  /^(trainer|swap|rollout|time|models\/.+)\/(seconds|[a-z_]+_seconds|[a-z_]*(?<!_per)_s)$/,
  /^env\/tool_ms\/.+(?<!_per_s)$/,
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
