// Sweeps: how far each is and its best trial; of one, all trials and which settings matter.

import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { Chart, type Look } from "../chart.tsx";
import { go, queryNow, useAfter, useAsked, useDoing, useMay, useNow, useQuery, useTypingWait } from "../hooks.ts";
import { ask } from "../lib/api.ts";
import { knownTo } from "../lib/jobs/rows.ts";
import {
  filterOf, groupings, queryOf, sortsFor, SWEEP_SORTS, valueOf, viewOf, withLabel, without, type Label, type ListView, type Property,
} from "../lib/jobs/view.ts"; // prettier-ignore
import { bestText, comparisonOf, lastName, progress, ranked, seedText, settingText, trialValue } from "../lib/sweeps.ts";
import type { Sweep, SweepSummary, SweepTrial } from "../lib/types.ts";
import { ago, duration, short } from "../lib/words.ts";
import { type Column, Empty, Facts, Progress, Said, Search, Select, State, Table } from "../parts.tsx";
import { MOST_RUNS } from "./compare/compare.tsx";
import { Labels } from "./job/labels.tsx";
import { Chip, Filters } from "./jobs/filters.tsx";
import { Groups } from "./jobs/groups.tsx";
import { Share } from "./share.tsx";

const LOOK_S = 3;

const STATES = ["", "running", "succeeded", "failed", "cancelled"];
const PAGE = 200;
/** The most sweeps that one answer of the API has. */
const MOST = 1000;

export function Sweeps(): JSX.Element {
  const [query, setQuery] = useQuery();
  const view = viewOf(query);
  const { labels, by, sort } = view;
  const change = (part: Partial<ListView>): void => setQuery(queryOf({ ...viewOf(queryNow()), ...part }));
  const choose = (label: Label): void => change({ by: "", labels: withLabel(labels, label) });
  const filtered = (label: Label): void => change({ labels: withLabel(labels, label) });
  const filter = filterOf(view);
  const waitMs = useTypingWait(`${filter}`);
  const seen = useRef(new Map<string, SweepSummary>()); // what is known here shows at once, until the server has answered
  return (
    <>
      <h1>Sweeps</h1>
      <div class="bar">
        <Search label="Search sweeps" placeholder="Name, id, kind, environment, model, notes…" value={view.search} set={(search) => change({ search })} />
        <Select label="State" value={valueOf(labels, "state")} of={STATES.map((one) => [one, one || "any state"])} choose={(one) => filtered(["state", one])} />
        <Filters of="sweeps" labels={labels} choose={filtered} />
        <Select label="Order" value={sort} of={sortsFor(sort, SWEEP_SORTS)} choose={(one) => change({ sort: one })} />
        <Select label="Group by" value={by} of={groupings} choose={(one) => change({ by: one as Property | "" })} />
        {labels.map((label) => label[0] !== "state" && <Chip key={label.join()} label={label} remove={() => change({ labels: without(labels, label) })} />)}
      </div>
      {by ? (
        <Groups key={`${by}${filter}`} of="sweeps" by={by} filter={`&${filter}`} waitMs={waitMs} choose={choose} />
      ) : (
        <Found
          key={`${filter}`}
          filter={`&${new URLSearchParams([["sort", sort], ...filter])}`}
          clear={`${filter}` ? () => change({ search: "", labels: [] }) : null}
          waitMs={waitMs}
          seen={seen.current}
          known={() => knownTo(view, seen.current.values())}
          choose={choose}
        />
      )}
    </>
  );
}

interface FoundProps {
  filter: string;
  /** Shows all sweeps; null: it does. */
  clear: (() => void) | null;
  waitMs: number;
  /** All sweeps that were listed so far, by id. */
  seen: Map<string, SweepSummary>;
  /** Those among them that match. */
  known: () => SweepSummary[];
  choose: (label: Label) => void;
}

function Found({ filter, clear, waitMs, seen, known, choose }: FoundProps): JSX.Element {
  const [limit, setLimit] = useState(PAGE);
  const path = `/v1/sweeps?limit=${limit}${filter}`;
  const { value, problem } = useAsked<{ sweeps: SweepSummary[]; more: boolean }>(useAfter(waitMs) ? path : null, LOOK_S);
  const sweeps = value?.sweeps ?? (problem ? [] : known());
  if (!value && problem) return <Said problem={problem} />;
  if (!value && !sweeps.length) return <Empty>Loading…</Empty>;
  for (const sweep of value?.sweeps ?? []) seen.set(sweep.id, sweep);
  return (
    <>
      <Said problem={problem} />
      {sweeps.length ? <SweepTable sweeps={sweeps} choose={choose} /> : <Nothing clear={clear} />}
      {value?.more && (limit < MOST ? <button onClick={() => setLimit(limit + PAGE)}>More sweeps</button> : <p class="dim">the first {MOST} sweeps; filters find others</p>)}
    </>
  );
}

function Nothing({ clear }: Pick<FoundProps, "clear">): JSX.Element {
  return clear ? (
    <Empty>
      No sweep matches the filters. <button onClick={clear}>Clear the filters</button>
    </Empty>
  ) : (
    <Empty>
      No sweeps yet. <code>opentinker submit examples/sweep_toy.toml</code> starts one.
    </Empty>
  );
}

function SweepTable({ sweeps, choose }: { sweeps: SweepSummary[]; choose: (label: Label) => void }): JSX.Element {
  const now = useNow(5);
  const columns: Column<SweepSummary>[] = [
    ["Sweep", (sweep) => <Named sweep={sweep} choose={choose} />],
    ["State", (sweep) => <State state={sweep.state} />],
    ["Trials", (sweep) => <Trials of={sweep} />],
    ["Metric", (sweep) => `${sweep.goal} ${sweep.metric}`],
    ["Best", (sweep) => sweep.best && short(sweep.best.value)],
    ["Project", (sweep) => sweep.project && <Only label={["project", sweep.project]} choose={choose} />],
    ["Created", (sweep) => ago(sweep.created, now), "dim"],
  ];
  const opens = (sweep: SweepSummary) => (event: MouseEvent) => {
    if (!(event.target instanceof HTMLElement && event.target.closest("a, button"))) go("sweeps", sweep.id);
  };
  return <Table of={columns} rows={sweeps} by={(sweep) => sweep.id} look="card" row={(sweep) => ({ onClick: opens(sweep) })} />;
}

function Named({ sweep, choose }: { sweep: SweepSummary; choose: (label: Label) => void }): JSX.Element {
  return (
    <>
      <a href={`#/sweeps/${sweep.id}`}>{sweep.name}</a> <small class="dim">{sweep.id}</small>{" "}
      {sweep.tags.map((tag) => (
        <Only key={tag} label={["tag", tag]} choose={choose} />
      ))}
    </>
  );
}

function Only({ label, choose }: { label: Label; choose: (label: Label) => void }): JSX.Element {
  return (
    <button class="chip label" title={`Only sweeps of this ${label[0]}`} onClick={() => choose(label)}>
      {label[1]}
    </button>
  );
}

function Trials({ of: sweep }: { of: SweepSummary }): JSX.Element {
  const all = Object.values(sweep.trials).reduce((sum, count) => sum + count, 0);
  return <Progress step={all - (sweep.trials.running ?? 0)} steps={sweep.planned} state={sweep.state} />;
}

export function SweepView({ id }: { id: string }): JSX.Element {
  const { value: sweep, problem, again } = useAsked<Sweep>(`/v1/sweeps/${encodeURIComponent(id)}`, LOOK_S);
  const { problem: refused, act } = useDoing();
  const may = useMay("jobs:write");
  const now = useNow(5);
  if (!sweep) return problem ? <Said problem={problem} /> : <Empty>Loading…</Empty>;
  const cancel = (): void => {
    if (!confirm(`Cancel sweep ${sweep.name} and its jobs?`)) return;
    act(() => ask(`/v1/sweeps/${encodeURIComponent(id)}/cancel`, { method: "POST" }).then(again));
  };
  return (
    <>
      <p>
        <a href="#/sweeps">Sweeps</a>
      </p>
      <section class="card">
        <h1>{sweep.name}</h1>
        <p>
          <State state={sweep.state} /> <Trials of={sweep} /> <small class="dim">{sweep.id}</small>{" "}
          {may && sweep.state === "running" && <button onClick={cancel}>Cancel</button>}
        </p>
        {sweep.reason && <p>{sweep.reason}</p>}
        {sweep.undelivered.map((one) => (
          <p key={`${one.occasion} ${one.entry}`}>
            Message <i>{one.occasion}</i> to notify.{one.entry} not delivered: {one.error}
          </p>
        ))}
        <Labels of={sweep} at={`/v1/sweeps/${encodeURIComponent(id)}`} again={again} />
        <Said problem={problem ?? refused} />
        <Facts
          of={[
            ["method", sweep.method],
            [sweep.goal, sweep.metric],
            ["best so far", bestText(sweep) || "none: no trial has finished"],
            ["time", duration((sweep.finished ?? now) - sweep.created)],
            ["jobs", sweep.jobs],
            ["worker-seconds", short(sweep.worker_s)],
          ]}
        />
      </section>
      <Advance of={sweep} />
      <Importance of={sweep} />
      <section class="card">
        <h2>Trials, the best first</h2>
        <Compared sweep={sweep} />
        <TrialTable sweep={sweep} />
      </section>
    </>
  );
}

const LOOK: Look = { axis: "step", smooth: 0, log: false };

/** The best value so far, trial by trial. */
function Advance({ of: sweep }: { of: Sweep }): JSX.Element | null {
  const { values, best } = progress(sweep);
  if (values.length < 2) return null;
  const x = values.map((_, at) => at + 1);
  const lines = [
    { label: "best so far", x, y: best, exact: true },
    { label: "each trial", x, y: values, dots: true, exact: true },
  ];
  return <Chart title={`${sweep.metric} by finished trials`} about="the best value so far after each finished trial" lines={lines} look={LOOK} unit="trial" />;
}

const SHARES: Column<[string, number]>[] = [
  ["Setting", ([path]) => <code>{path}</code>],
  [
    "Share of the difference between good and ordinary trials",
    ([path, share]) => (
      <>
        <progress value={share} max={1} aria-label={`share of ${path}`} /> {Math.round(share * 100)}%
      </>
    ),
  ],
];

function Importance({ of: sweep }: { of: Sweep }): JSX.Element | null {
  const shares = Object.entries(sweep.importance);
  if (!shares.length) return null;
  return (
    <section class="card">
      <h2>Which settings matter</h2>
      <Table of={SHARES} rows={shares} by={([path]) => path} />
    </section>
  );
}

/** A comparison of the jobs of the best trials, as many as it takes, and a link to it for people without a key. */
function Compared({ sweep }: { sweep: Sweep }): JSX.Element | null {
  const jobs = ranked(sweep).flatMap((trial) => trial.jobs.flatMap(({ id }) => id || []));
  if (jobs.length < 2) return null;
  const some = jobs.slice(0, MOST_RUNS);
  const at = comparisonOf(sweep, some);
  return (
    <div class="bar">
      <a href={`#${at}`}>{some.length < jobs.length ? `Compare the best ${MOST_RUNS} jobs` : "Compare its jobs"}</a>
      <Share jobs={some} at={at} />
    </div>
  );
}

function TrialTable({ sweep }: { sweep: Sweep }): JSX.Element {
  const paths = Object.keys(sweep.spec.sweep.parameters);
  const names = paths.map((path) => lastName(path, paths));
  if (!sweep.all_trials.length) return <Empty>{sweep.finished === null ? "No trials yet: the first start within seconds." : "It ended before its first trial."}</Empty>;
  const columns: Column<SweepTrial>[] = [
    [
      "Trial",
      ({ number }) => (
        <>
          {number} {sweep.best?.number === number && <b>best</b>}
        </>
      ),
    ],
    [
      "State",
      (trial) => (
        <>
          <State state={trial.state} /> {trial.reason && <small class="dim">{trial.reason}</small>}
        </>
      ),
    ],
    [
      sweep.metric,
      (trial) => {
        const value = trialValue(trial);
        return <span class={trial.value === null ? "dim" : undefined}>{value === null ? "" : short(value)}</span>;
      },
    ],
    ...names.map((name, at): Column<SweepTrial> => [name, (trial) => settingText(trial.settings[paths[at]!])]),
    ["Jobs", (trial) => trial.jobs.flatMap((job) => (job.id ? [<a key={job.id} href={`#/jobs/${job.id}`}>{job.id}</a>, seedText(job), " "] : []))],
  ];
  return <Table of={columns} rows={ranked(sweep)} by={(trial) => trial.number} />;
}
