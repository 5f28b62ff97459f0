// The result of an eval job: categories, and every metric, with their intervals.

import type { JSX } from "preact";
import { resultRows, type ResultRow } from "../../lib/checkpoints/results.ts";
import type { Category, EvalResult, Estimate } from "../../lib/types.ts";
import { short } from "../../lib/words.ts";
import { Bounded, Table, type Column, type Measured } from "../../parts.tsx";

export function Results({ result }: { result: EvalResult }): JSX.Element {
  const rows = resultRows(result.values, result.categories.map((one) => one.name));
  const intervals = rows.some((row) => row.interval);
  return (
    <section class="card results" aria-label="Result">
      <h2>
        Result <small class="dim">weights {result.version}</small>
      </h2>
      {result.categories.length > 0 && <Table label="By category" of={CATEGORIES} rows={result.categories} by={(one) => one.name} />}
      <Table of={intervals ? [...VALUES, INTERVAL] : VALUES} rows={rows} by={(row) => row.name} />
    </section>
  );
}

const VALUES: Column<ResultRow>[] = [
  ["Metric", (row) => row.name],
  ["Value", (row) => <b>{short(row.value)}</b>],
];
const INTERVAL: Column<ResultRow> = ["95 % interval", ({ interval }) => interval?.map(short).join(" to ")];
const CATEGORIES: Column<Category>[] = [
  ["Category", (one) => one.name],
  ["Episodes", (one) => one.episodes],
  ["Reward", (one) => <Bounded of={bounded(one.reward)} />],
  ["Solved", (one) => <Bounded of={bounded(one.solved)} />],
];

function bounded({ value, low, high }: Estimate): Measured {
  return { value, interval: low === null || high === null ? null : [low, high] };
}
