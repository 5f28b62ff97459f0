// Several runs beside each other: which settings differ, how each metric ended, and runs of one kind as one line.

import { aligned, type Line } from "../curves/series.ts";
import { lookOf } from "../looks.ts";
import { BUT_SEEDS, lastName, settingText } from "../sweeps.ts";
import type { Json, Point } from "../types.ts";
import type { Direction } from "./direction.ts";

/** What people call a job says nothing about what it does. */
const LABELS = new Set(["name", "project", "tags", "notes", "notify"]);

export interface Run {
  id: string;
  name: string;
  tags: string[];
  spec: Json;
  points: Point[];
}

export interface Difference {
  path: string;
  /** Of each run, as text; empty: it does not have the setting. */
  values: string[];
}

export function flattened(spec: Json, path = ""): Map<string, string> {
  if (typeof spec !== "object" || spec === null || Array.isArray(spec)) return new Map([[path, typeof spec === "string" ? spec : JSON.stringify(spec)]]);
  const found = new Map<string, string>();
  for (const [name, part] of Object.entries(spec)) {
    if (!path && LABELS.has(name)) continue;
    for (const [inner, value] of flattened(part, path ? `${path}.${name}` : name)) found.set(inner, value);
  }
  return found;
}

/** The settings that are not the same in all runs. */
export function differences(specs: Json[]): Difference[] {
  const all = specs.map((spec) => flattened(spec));
  const paths = [...new Set(all.flatMap((one) => [...one.keys()]))].sort();
  return paths
    .map((path) => ({ path, values: all.map((one) => one.get(path) ?? "") }))
    .filter(({ values }) => new Set(values).size > 1);
}

/** Every metric that a run has, those of most runs first. */
export function metricNames(runs: Run[]): string[] {
  const counts = new Map<string, number>();
  for (const run of runs) for (const name of new Set(run.points.flatMap((point) => Object.keys(point.values)))) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0])).map(([name]) => name);
}

/** What each run is called in a legend: its name, with its id where several have that name. */
export function labelsOf(runs: Pick<Run, "id" | "name">[]): string[] {
  return runs.map(({ id, name }) => (runs.filter((other) => other.name === name).length > 1 ? `${name} ${id}` : name));
}

const curves = new WeakMap<Run, Map<string, Line>>();

/** A metric of a run by step; a step that was trained again replaces the old one and those after it. */
export function curve(run: Run, name: string, label = run.name): Line {
  const known = curves.get(run) ?? new Map<string, Line>();
  curves.set(run, known);
  let line = known.get(name);
  if (!line) known.set(name, (line = read(run, name)));
  return { ...line, label };
}

function read(run: Run, name: string): Line {
  const line: Line = { label: run.name, x: [], y: [] };
  for (const point of [...run.points].sort((a, b) => a.time - b.time)) {
    const value = point.values[name];
    if (value === undefined) continue;
    while (line.x.length && line.x[line.x.length - 1]! >= point.step) {
      line.x.pop();
      line.y.pop();
    }
    line.x.push(point.step);
    line.y.push(value);
  }
  return line;
}

export interface Ending {
  /** The lowest value of a metric that falls, the highest of all others. */
  best: number;
  last: number;
  /** Mean over the steps, by the trapezoidal rule. */
  area: number;
}

export function ending(line: Line, direction: Direction = null): Ending | null {
  const { x, y } = line;
  if (!y.length) return null;
  let area = 0;
  let best = y[0]!;
  const falls = direction === "falls";
  for (const value of y) if (falls ? value < best : value > best) best = value;
  for (let i = 1; i < x.length; i += 1) area += ((x[i]! - x[i - 1]!) * (y[i]! + y[i - 1]!)) / 2;
  const width = x[x.length - 1]! - x[0]!;
  return { best, last: y[y.length - 1]!, area: width ? area / width : y[0]! };
}

/** One line for each group: the mean of its runs where all of those that have come so far have a value, with one standard deviation. */
export function grouped(lines: Line[], groups: string[]): Line[] {
  return [...new Set(groups)].map((group, place) => {
    const own = lines.filter((_, i) => groups[i] === group && lines[i]!.x.length);
    const at = new Map<number, number[]>();
    for (const line of own) line.x.forEach((x, i) => at.set(x, [...(at.get(x) ?? []), line.y[i]!]));
    const steps = [...at].filter(([x, values]) => values.length === own.filter((line) => line.x[line.x.length - 1]! >= x).length).sort((a, b) => a[0] - b[0]);
    const mean = steps.map(([, values]) => values.reduce((sum, value) => sum + value, 0) / values.length);
    const spread = steps.map(([, values], i) => Math.sqrt(values.reduce((sum, value) => sum + (value - mean[i]!) ** 2, 0) / values.length));
    return {
      ...lookOf(place),
      label: `${group || "–"} (${own.length})`,
      x: steps.map(([x]) => x),
      y: mean,
      low: mean.map((value, i) => value - spread[i]!),
      high: mean.map((value, i) => value + spread[i]!),
    };
  });
}

/** A tag as a key and a value: `seed=3`, `seed:3`, `seed-3` and `seed 3` have the key `seed`. */
const KEYED = /^(.*[^\s=:-])\s*(?:[=:]|[ -](?=\d))\s*(\S.*)$/;
const OF_KEY = "tag-key:";
const HAS = "has-tag:";
const SEED = /(^|\.)seed$/;

/** By what runs can be grouped besides settings: all tags of each, the values of a key, or whether they have a tag. */
export function tagGroupings(runs: Pick<Run, "tags">[]): [by: string, text: string][] {
  const all = [...new Set(runs.flatMap((run) => run.tags))].sort();
  if (!all.length) return [];
  const keys = [...new Set(all.flatMap((tag) => KEYED.exec(tag)?.[1] ?? []))];
  const some = all.filter((tag) => runs.some((run) => !run.tags.includes(tag)));
  const several = keys.filter((key) => new Set(runs.map((run) => valueOf(run, key))).size > 1);
  return [
    ["tag", "by all tags"],
    ...several.map((key): [string, string] => [OF_KEY + key, `by tag ${key}`]),
    ...some.map((tag): [string, string] => [HAS + tag, `with or without tag ${tag}`]),
  ];
}

function valueOf(run: Pick<Run, "tags">, key: string): string {
  return run.tags.flatMap((tag) => (KEYED.exec(tag)?.[1] === key ? KEYED.exec(tag)![2]! : [])).join(" + ");
}

/** By which of the settings that differ runs can be grouped; by all of them but seeds, where there are seeds. */
export function settingGroupings(differing: Difference[]): [by: string, text: string][] {
  const single = differing.map(({ path }): [string, string] => [path, `by ${path}`]);
  return differing.some(({ path }) => SEED.test(path)) ? [[BUT_SEEDS, "by all settings but seeds"], ...single] : single;
}

/** All settings that differ, but for seeds: "lr 0.0001, group_size 8". Numbers are rounded where that makes none the same. */
function configurations(runs: Run[]): string[] {
  const own = differences(runs.map((run) => run.spec)).filter(({ path }) => !SEED.test(path));
  const paths = own.map(({ path }) => path);
  const said = (text: (value: string) => string): string[] =>
    runs.map((_, at) => own.map(({ path, values }) => `${lastName(path, paths)} ${text(values[at]!) || "–"}`).join(", ") || "same settings");
  const [exact, rounded] = [said((value) => value), said((value) => (value.includes(".") && Number(value) ? settingText(Number(value)) : value))];
  return new Set(rounded).size === new Set(exact).size ? rounded : exact;
}

/** The group of each run, by its tags or by settings that differ. */
export function groupsOf(runs: Run[], by: string): string[] {
  if (by === BUT_SEEDS) return configurations(runs);
  if (by === "tag") return runs.map((run) => run.tags.join(" + "));
  if (by.startsWith(OF_KEY)) return runs.map((run) => valueOf(run, by.slice(OF_KEY.length)));
  const tag = by.startsWith(HAS) ? by.slice(HAS.length) : null;
  if (tag !== null) return runs.map((run) => (run.tags.includes(tag) ? tag : `not ${tag}`));
  const found = differences(runs.map((run) => run.spec)).find((one) => one.path === by);
  return found ? found.values : runs.map((run) => run.id);
}

/** Points of a setting against how a metric ended, with the place of their run; those whose setting is no number are left out. */
export function scatter(runs: Run[], path: string, metric: string): { x: number; y: number; label: string; run: number }[] {
  return runs.flatMap((run, place) => {
    const x = Number(flattened(run.spec).get(path) || NaN);
    const end = ending(curve(run, metric));
    return Number.isFinite(x) && end ? [{ x, y: end.last, label: `${run.name} ${run.id}`, run: place }] : [];
  });
}

/** The curves of some metrics, a row for each step of each run. */
export function curvesTable(runs: Run[], metrics: string[]): string[][] {
  const rows = runs.flatMap((run) => {
    const lines = metrics.map((name) => curve(run, name));
    const table = aligned(lines.map(({ x, y }) => ({ x, ys: [y] })));
    return table[0]!.map((step, at) => [run.id, run.name, String(step), ...table.slice(1).map((column) => String(column[at] ?? ""))]);
  });
  return [["id", "name", "step", ...metrics], ...rows];
}
