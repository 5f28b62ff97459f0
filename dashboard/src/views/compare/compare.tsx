// Runs beside each other: curves, the settings that differ, how they ended. The address holds the view.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { Chart, type Look } from "../../chart.tsx";
import { go } from "../../hooks.ts";
import { ask, job as pathOf, Problem } from "../../lib/api.ts";
import { chosenMetrics, withMetrics } from "../../lib/compare/chosen.ts";
import {
  curve, curvesTable, differences, ending, grouped, groupsOf, labelsOf, metricNames, settingGroupings, tagGroupings, type Run,
} from "../../lib/compare/compare.ts"; // prettier-ignore
import { directionOf, winners, type Direction } from "../../lib/compare/direction.ts";
import { bareName, firstMetrics, policiesIn } from "../../lib/compare/policies.ts";
import { csv } from "../../lib/csv.ts";
import { lookOf } from "../../lib/looks.ts";
import { FINAL, type JobDetail, type Point } from "../../lib/types.ts";
import { save, short } from "../../lib/words.ts";
import { Choice, Empty, Said, Select, Table, type Column } from "../../parts.tsx";
import { exported } from "./exported.ts";
import { Pairs } from "./pairs.tsx";
import { Parallel } from "./parallel.tsx";
import { Scatter } from "./scatter.tsx";
import { Share } from "../share.tsx";

export const MOST_RUNS = 50;
const LOOK_MS = 5000;
const PAGE = 5000;
const SMOOTH = [0, 0.6, 0.9];

interface History {
  metrics: (Point & { cursor: number })[];
  cursor: number;
  more: boolean;
}

/** A run as far as it was read. */
interface Read {
  id: string;
  run: Run | null;
  cursor: number;
  /** Nothing more will come. */
  over: boolean;
  problem: Problem | null;
}

/** `view`: what the address says, as a query. */
export function Compare({ ids: all, view }: { ids: string[]; view: string }): JSX.Element {
  const ids = all.slice(0, MOST_RUNS);
  const { runs, problems, isReading } = useRuns(ids);
  const query = new URLSearchParams(view);
  const change = (name: string, value: string): void => {
    if (value) query.set(name, value);
    else query.delete(name);
    go("compare", all.join(), `${query}`);
  };
  const show = (metrics: string[]): void => go("compare", all.join(), `${withMetrics(query, metrics)}`);
  const names = useMemo(() => metricNames(runs), [runs]);
  const policies = useMemo(() => [...new Set(runs.flatMap((run) => policiesIn(run.spec)))], [runs]);
  const directed: Directed = (name) => directionOf(bareName(name, policies));
  const shown = chosenMetrics(query) ?? firstMetrics(names, policies);
  const by = query.get("by") ?? "";
  const look: Look = { axis: "step", smooth: Number(query.get("smooth") ?? 0), log: query.has("log") };
  const differing = useMemo(() => differences(runs.map((run) => run.spec)), [runs]);
  const groups = by ? groupsOf(runs, by) : [];
  const labels = useMemo(() => labelsOf(runs), [runs]);
  const looks = runs.map((run) => lookOf(ids.indexOf(run.id))); // of a run, in every chart
  const against = query.get("against") ?? "";
  const metric = names.includes(against) ? against : (shown[0] ?? "");
  if (!ids.length) return <Empty>Select jobs in the list, then press Compare.</Empty>;
  return (
    <>
      <h1 class="unseen">Compare</h1>
      {problems.map(([id, problem]) => (
        <Said key={id} problem={problem} />
      ))}
      <div class="bar">
        <a href="#/">Jobs</a>
        <Share jobs={ids} />
        <Select
          label="Group by"
          value={by}
          of={[["", "each run"], ...tagGroupings(runs), ...settingGroupings(differing)]}
          choose={(value) => change("by", value)}
        />
        <Select
          label="Add a metric"
          value=""
          of={[["", "add a metric…"], ...names.filter((name) => !shown.includes(name)).map((name) => [name, name] as const)]}
          choose={(name) => show([...shown, name])}
        />
        {differing.length > 0 && metric && (
          <Select
            label="Settings against"
            value={metric}
            of={[...new Set([metric, ...names])].map((name) => [name, `settings against ${name}`] as const)}
            choose={(name) => change("against", name)}
          />
        )}
        <Choice label="smooth" value={look.smooth} of={SMOOTH} say={(one) => (one ? String(one) : "off")} choose={(one) => change("smooth", one ? String(one) : "")} />
        <label class="check">
          <input type="checkbox" checked={look.log} onChange={(event) => change("log", event.currentTarget.checked ? "1" : "")} /> log
        </label>
        <span class="spring" />
        <button onClick={() => save("compare.csv", new Blob([csv(tableOf(runs, differing, shown, directed))], { type: "text/csv" }))}>CSV</button>
        <button onClick={() => save("curves.csv", new Blob([csv(curvesTable(runs, shown))], { type: "text/csv" }))}>Curves as CSV</button>
        <button onClick={() => save("compare.html", new Blob([exported()], { type: "text/html" }))}>HTML</button>
      </div>
      {all.length > ids.length && (
        <p class="note">
          These are the first {ids.length} of {all.length} jobs: no more are compared at once. <a href="#/">Select fewer</a>, or filter the list first.
        </p>
      )}
      {isReading && <p class="dim">Reading…</p>}
      <div class="charts">
        {shown.map((name) => {
          const lines = runs.map((run, at) => ({ ...curve(run, name, labels[at]), ...looks[at]! }));
          const others = shown.filter((one) => one !== name);
          const remove = others.length ? () => show(others) : undefined;
          return <Chart key={name} title={name} about="" lines={by ? grouped(lines, groups) : lines} look={look} positive={false} remove={remove} />;
        })}
      </div>
      <RunTable runs={runs} differing={differing} metrics={shown} directed={directed} remove={(id) => go("compare", all.filter((one) => one !== id).join(), `${query}`)} />
      {metric && <Parallel runs={runs} metric={metric} falls={directed(metric) === "falls"} />}
      <div class="charts">
        {metric && differing.map(({ path }) => <Scatter key={path} path={path} metric={metric} runs={runs} looks={looks} />)}
      </div>
      <Pairs runs={runs} query={query} change={change} />
    </>
  );
}

/** Which way a metric of these runs is better. */
type Directed = (metric: string) => Direction;

type Differing = ReturnType<typeof differences>;

/** Columns of a metric: its best value, its last one and its area. */
const ENDS = 3;

/** Column names, then a row for each run. */
function tableOf(runs: Run[], differing: Differing, metrics: string[], directed: Directed): string[][] {
  const ends = metrics.flatMap((name) => [`${name} ${directed(name) ? "best" : "highest"}`, `${name} last`, `${name} area`]);
  const heads = ["id", "name", ...differing.map(({ path }) => path), ...ends];
  const rows = runs.map((run, i) => {
    const ends = metrics.flatMap((name) => {
      const end = ending(curve(run, name), directed(name));
      return end ? [end.best, end.last, end.area].map(String) : ["", "", ""];
    });
    return [run.id, run.name, ...differing.map(({ values }) => values[i]!), ...ends];
  });
  return [heads, ...rows];
}

interface RunTableProps {
  runs: Run[];
  differing: Differing;
  metrics: string[];
  directed: Directed;
  remove: (id: string) => void;
}

function RunTable({ runs, differing, metrics, directed, remove }: RunTableProps): JSX.Element {
  const [heads, ...rows] = tableOf(runs, differing, metrics, directed);
  const texts = 2 + differing.length;
  const best = heads!.map((_, at) => (at < texts ? [] : winners(rows.map((row) => (row[at] ? Number(row[at]) : null)), directed(metrics[Math.floor((at - texts) / ENDS)]!))));
  const number = (cell: string, wins: boolean): ComponentChildren => (wins ? <b title="best">{short(Number(cell))} ★</b> : cell && short(Number(cell)));
  const shown = (row: string[], at: number): ComponentChildren => (at < texts ? <code>{row[at]}</code> : number(row[at]!, best[at]!.includes(rows.indexOf(row))));
  const columns: Column<string[]>[] = [
    [heads![1]!, (row) => <a href={`#/jobs/${row[0]}`}>{row[1]}</a>],
    ...heads!.slice(2).map((head, at): Column<string[]> => [head, (row) => shown(row, at + 2)]),
    [
      "",
      (row) => (
        <button class="plain" aria-label={`Remove ${row[1]}`} onClick={() => remove(row[0]!)}>
          ×
        </button>
      ),
    ],
  ];
  return (
    <div class="scrolls">
      <Table of={columns} rows={rows} by={(row) => row[0]!} look="card compared" />
    </div>
  );
}

/** The runs with their whole histories, read on while they are not over. One that cannot be read keeps up no other. */
function useRuns(ids: string[]): { runs: Run[]; problems: [string, Problem][]; isReading: boolean } {
  const [known, set] = useState<Read[]>([]);
  const [isReading, setReading] = useState(true);
  useEffect(() => {
    const stop = new AbortController();
    let timer = 0;
    let reads: Read[] = ids.map((id) => ({ id, run: null, cursor: 0, over: false, problem: null }));
    const look = async (): Promise<void> => {
      reads = await Promise.all(reads.map((read) => readOn(read, stop.signal)));
      if (stop.signal.aborted) return;
      set(reads);
      setReading(false);
      if (reads.some((read) => !read.over)) timer = window.setTimeout(() => void look(), LOOK_MS);
    };
    void look();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [ids.join()]);
  // the address may name other runs than those that were read last
  const runs = useMemo(() => known.flatMap(({ id, run }) => (run && ids.includes(id) ? run : [])), [known, ids.join()]);
  return { runs, problems: known.flatMap(({ id, problem }) => (problem ? [[id, problem]] : [])), isReading };
}

/** Returns what it had and what came, also if not everything did. */
async function readOn(before: Read, signal: AbortSignal): Promise<Read> {
  if (before.over) return before;
  const { id } = before;
  let { run, cursor } = before;
  try {
    const job = await ask<JobDetail>(pathOf(id), { signal });
    for (;;) {
      const page: History = await ask<History>(pathOf(id, `/metrics?limit=${PAGE}&after=${cursor}`), { signal });
      run = { id, name: job.name, tags: job.tags, spec: job.spec, points: [...(run?.points ?? []), ...page.metrics] };
      cursor = page.cursor;
      if (!page.more) return { id, run, cursor, over: FINAL.includes(job.state), problem: null };
    }
  } catch (error) {
    const problem = error instanceof Problem ? error : new Problem(0, String(error));
    return { id, run, cursor, over: [401, 403, 404].includes(problem.status), problem };
  }
}
