// Sweeps: how far each is and its best trial; of one, all trials and which settings matter.

import type { JSX } from "preact";
import { Chart, type Look } from "../chart.tsx";
import { go, useAsked, useDoing, useMay, useNow } from "../hooks.ts";
import { ask } from "../lib/api.ts";
import { bestText, lastName, progress, ranked, seedText, settingText, trialValue } from "../lib/sweeps.ts";
import type { Sweep, SweepSummary, SweepTrial } from "../lib/types.ts";
import { ago, duration, short } from "../lib/words.ts";
import { Empty, Facts, Progress, Said, State, Table, type Column } from "../parts.tsx";
import { MOST_RUNS } from "./compare/compare.tsx";
import { Share } from "./share.tsx";

const LOOK_S = 3;

export function Sweeps(): JSX.Element {
  const { value, problem } = useAsked<{ sweeps: SweepSummary[] }>("/v1/sweeps", LOOK_S);
  const now = useNow(5);
  if (!value) return problem ? <Said problem={problem} /> : <Empty>Loading…</Empty>;
  const columns: Column<SweepSummary>[] = [
    [
      "Sweep",
      (sweep) => (
        <>
          <a href={`#/sweeps/${sweep.id}`}>{sweep.name}</a> <small class="dim">{sweep.id}</small>
        </>
      ),
    ],
    ["State", (sweep) => <State state={sweep.state} />],
    ["Trials", (sweep) => <Trials of={sweep} />],
    ["Metric", (sweep) => `${sweep.goal} ${sweep.metric}`],
    ["Best", (sweep) => sweep.best && short(sweep.best.value)],
    ["Created", (sweep) => ago(sweep.created, now), "dim"],
  ];
  return (
    <>
      <h1>Sweeps</h1>
      <Said problem={problem} />
      {value.sweeps.length === 0 ? (
        <Empty>
          No sweeps yet. <code>opentinker submit examples/sweep_toy.toml</code> starts one.
        </Empty>
      ) : (
        <Table of={columns} rows={value.sweeps} by={(sweep) => sweep.id} look="card" row={(sweep) => ({ onClick: () => go("sweeps", sweep.id) })} />
      )}
    </>
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
  return (
    <div class="bar">
      <a href={`#/compare/${some.join()}`}>{some.length < jobs.length ? `Compare the best ${MOST_RUNS} jobs` : "Compare its jobs"}</a>
      <Share jobs={some} at={`/compare/${some.join()}`} />
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
