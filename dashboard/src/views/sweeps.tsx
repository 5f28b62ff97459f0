// Sweeps: how far each is and its best trial; of one, all trials and which settings matter.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { go, useAsked, useMay, useNow } from "../hooks.ts";
import { ask, Problem } from "../lib/api.ts";
import { lastName, ranked, settingText, trialValue } from "../lib/sweeps.ts";
import type { Sweep, SweepSummary, SweepTrial } from "../lib/types.ts";
import { ago, duration, short } from "../lib/words.ts";
import { Empty, Facts, Head, Progress, Said, State } from "../parts.tsx";

const LOOK_S = 3;

export function Sweeps(): JSX.Element {
  const { value, problem } = useAsked<{ sweeps: SweepSummary[] }>("/v1/sweeps", LOOK_S);
  const now = useNow(5);
  if (!value) return problem ? <Said problem={problem} /> : <Empty>…</Empty>;
  return (
    <>
      <h1>Sweeps</h1>
      <Said problem={problem} />
      {value.sweeps.length === 0 ? (
        <Empty>
          None yet. <code>opentinker submit examples/sweep_toy.toml</code> makes one.
        </Empty>
      ) : (
        <table class="card">
          <Head of={["Sweep", "State", "Trials", "Metric", "Best", "Created"]} />
          <tbody>
            {value.sweeps.map((sweep) => (
              <tr key={sweep.id} onClick={() => go("sweeps", sweep.id)}>
                <td data-label="Sweep">
                  <a href={`#/sweeps/${sweep.id}`}>{sweep.name}</a> <small class="dim">{sweep.id}</small>
                </td>
                <td data-label="State">
                  <State state={sweep.state} />
                </td>
                <td data-label="Trials">
                  <Trials of={sweep} />
                </td>
                <td data-label="Metric">
                  {sweep.goal} {sweep.metric}
                </td>
                <td data-label="Best">{sweep.best ? short(sweep.best.value) : ""}</td>
                <td data-label="Created" class="dim">
                  {ago(sweep.created, now)}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
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
  const [refused, setRefused] = useState<Problem | null>(null);
  const may = useMay("jobs:write");
  const now = useNow(5);
  if (!sweep) return problem ? <Said problem={problem} /> : <Empty>…</Empty>;
  const cancel = async (): Promise<void> => {
    if (!confirm(`Cancel sweep ${sweep.name} and its jobs?`)) return;
    try {
      await ask(`/v1/sweeps/${encodeURIComponent(id)}/cancel`, { method: "POST" });
      again();
    } catch (error) {
      setRefused(error instanceof Problem ? error : new Problem(0, String(error)));
    }
  };
  const facts: [string, JSX.Element | string][] = [
    ["method", sweep.method],
    [sweep.goal, sweep.metric],
    ["time", duration((sweep.finished ?? now) - sweep.created)],
    ["jobs", String(sweep.jobs)],
    ["worker-seconds", short(sweep.worker_s)],
  ];
  return (
    <>
      <p>
        <a href="#/sweeps">Sweeps</a>
      </p>
      <section class="card">
        <h1>{sweep.name}</h1>
        <p>
          <State state={sweep.state} /> <Trials of={sweep} /> <small class="dim">{sweep.id}</small>{" "}
          {may && sweep.state === "running" && <button onClick={() => void cancel()}>Cancel</button>}
        </p>
        {sweep.reason && <p>{sweep.reason}</p>}
        <Said problem={problem ?? refused} />
        <Facts of={facts} />
      </section>
      <Importance of={sweep} />
      <section class="card">
        <h2>Trials, the best first</h2>
        <TrialTable sweep={sweep} />
      </section>
    </>
  );
}

function Importance({ of: sweep }: { of: Sweep }): JSX.Element | null {
  const shares = Object.entries(sweep.importance);
  if (!shares.length) return null;
  return (
    <section class="card">
      <h2>Which settings matter</h2>
      <table>
        <Head of={["Setting", "Share of the difference between good and ordinary trials"]} />
        <tbody>
          {shares.map(([path, share]) => (
            <tr key={path}>
              <td data-label="Setting">
                <code>{path}</code>
              </td>
              <td data-label="Share">
                <progress value={share} max={1} aria-label={`share of ${path}`} /> {Math.round(share * 100)}%
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

function TrialTable({ sweep }: { sweep: Sweep }): JSX.Element {
  const paths = Object.keys(sweep.spec.sweep.parameters);
  const names = paths.map((path) => lastName(path, paths));
  if (!sweep.all_trials.length) return <Empty>None yet.</Empty>;
  return (
    <table>
      <Head of={["Trial", "State", sweep.metric, ...names, "Jobs"]} />
      <tbody>
        {ranked(sweep).map((trial) => (
          <TrialRow key={trial.number} trial={trial} paths={paths} names={names} metric={sweep.metric} best={sweep.best?.number === trial.number} />
        ))}
      </tbody>
    </table>
  );
}

interface RowProps {
  trial: SweepTrial;
  paths: string[];
  names: string[];
  metric: string;
  best: boolean;
}

function TrialRow({ trial, paths, names, metric, best }: RowProps): JSX.Element {
  const value = trialValue(trial);
  return (
    <tr>
      <td data-label="Trial">
        {trial.number} {best && <b>best</b>}
      </td>
      <td data-label="State" title={trial.reason}>
        <State state={trial.state} />
      </td>
      <td data-label={metric} class={trial.value === null ? "dim" : undefined}>
        {value === null ? "" : short(value)}
      </td>
      {paths.map((path, place) => (
        <td key={path} data-label={names[place]}>
          {settingText(trial.settings[path])}
        </td>
      ))}
      <td data-label="Jobs">
        {trial.jobs.map(
          (job) =>
            job.id && (
              <>
                <a href={`#/jobs/${job.id}`}>{job.id}</a>{" "}
              </>
            ),
        )}
      </td>
    </tr>
  );
}
