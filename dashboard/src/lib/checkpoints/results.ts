// An eval job's metrics as rows of a table.

import { short } from "../words.ts";

export interface ResultRow {
  /** Without val/. */
  name: string;
  value: number;
  interval: [number, number] | null;
}

const MAIN = ["exact", "pass/1", "reward/mean"];

/** The value that stands for an evaluation in lists, with its interval; undefined: it has none yet. */
export function mainResult(values: Record<string, number>): string | undefined {
  const rows = resultRows(values);
  const games = rows.filter((one) => one.name === "winrate" || one.name.startsWith("winrate/"));
  if (games.length) {
    return `won ${games.map((one) => `${Math.round(100 * one.value)}%${one.name === "winrate" ? "" : ` against ${one.name.slice(8)}`}`).join(", ")}`;
  }
  const row = MAIN.map((name) => rows.find((one) => one.name === name)).find(Boolean);
  return row && `${row.name} ${short(row.value)}${row.interval ? ` (${row.interval.map(short).join(" to ")})` : ""}`;
}

const FIRST = /^(reward\/mean|pass\/|exact$)/;

/** One row a metric: rewards, pass@k and exact matches first, then the others by name; none for what a table of these
 * categories shows. */
export function resultRows(values: Record<string, number>, categories: string[] = []): ResultRow[] {
  const rows: ResultRow[] = [];
  const elsewhere = new Set(categories.flatMap((name) => ["episodes", "reward", "pass/1"].map((what) => `val/task/${name}/${what}`)));
  for (const [name, value] of Object.entries(values)) {
    if (/\/(low|high)$/.test(name) || elsewhere.has(name)) continue;
    const base = name.replace(/\/mean$/, "");
    const low = values[`${base}/low`];
    const high = values[`${base}/high`];
    rows.push({
      name: name.replace(/^val\//, ""),
      value,
      interval: low === undefined || high === undefined ? null : [low, high],
    });
  }
  const rank = (row: ResultRow): number => (FIRST.test(row.name) ? 0 : 1);
  return rows.sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name, "en", { numeric: true }));
}
