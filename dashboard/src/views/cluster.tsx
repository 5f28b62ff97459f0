// The whole server: workers by pool and what they do, queues, and who waits for what.

import type { JSX } from "preact";
import { go, useAsked, useMay, useNow } from "../hooks.ts";
import { FINAL, type Job, type Queue, type Worker } from "../lib/types.ts";
import { machinesOf } from "../lib/machines.ts";
import { bytes, counted, duration } from "../lib/words.ts";
import { Empty, Said, Table, type Column } from "../parts.tsx";

const POOLS: [string, string][] = [
  ["trainer", "Trainers"],
  ["rollout", "Rollout workers"],
  ["reference", "Reference-forward"],
  ["env", "Env workers"],
];
const QUEUES: Record<string, string> = {
  TICKETS: "groups to be played, and groups being played",
  EXAMS: "evaluation episodes",
  SCORES: "groups waiting for reference-forward",
  COMMANDS: "commands of Tinker clients",
  SAMPLES: "samples that Tinker clients wait for",
  GROUPS: "groups that no checkpoint covers yet",
  METRICS: "history of metrics",
  TIMELINES: "activity history of workers",
  LOGS: "history of logs",
};
const LOOK_S = 2;
/** Jobs. */
const MOST = 500;

export function Cluster(): JSX.Element {
  const may = useMay("server:read");
  const workers = useAsked<{ workers: Worker[] }>(may ? "/v1/workers" : null, LOOK_S);
  const queues = useAsked<{ queues: Queue[] }>(may ? "/v1/queues" : null, LOOK_S);
  const jobs = useAsked<{ jobs: Job[]; more: boolean }>(`/v1/jobs?limit=${MOST}`, LOOK_S);
  return (
    <>
      <h1 class="unseen">Cluster</h1>
      <Said problem={workers.problem ?? queues.problem ?? jobs.problem} />
      {!may && <Empty>Only operators see the workers and queues of all tenants. What your own jobs wait for is in the list of jobs.</Empty>}
      {workers.value && <Workers workers={workers.value.workers} />}
      <Waiting jobs={jobs.value?.jobs ?? []} more={jobs.value?.more ?? false} />
      {queues.value && <Queues queues={queues.value.queues} />}
    </>
  );
}

function Waiting({ jobs, more }: { jobs: Job[]; more: boolean }): JSX.Element {
  const now = useNow(5);
  const active = jobs.filter((job) => !FINAL.includes(job.state));
  const waiting = active.filter((job) => job.waiting_for);
  const counts = new Map<string, number>();
  for (const job of active) counts.set(job.state, (counts.get(job.state) ?? 0) + 1);
  return (
    <section class="card">
      <h2>Waiting jobs</h2>
      <p class="dim">
        {active.length ? [...counts].map(([state, count]) => `${count} ${state}`).join(", ") : "No active jobs."}
        {more && ` Newest ${MOST} jobs only.`}
      </p>
      {waiting.length > 0 && (
        <table>
          <tbody>
            {waiting.map((job) => (
              <tr key={job.id} onClick={() => go("jobs", job.id)}>
                <td>
                  <a href={`#/jobs/${job.id}`}>{job.name}</a> <small class="dim">{job.id}</small>
                </td>
                <td>waits for {job.waiting_for}</td>
                <td class="dim">
                  {job.state} for {duration(now - job.since)}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {active.length > 0 && waiting.length === 0 && <p class="dim">No job is waiting.</p>}
    </section>
  );
}

function Workers({ workers }: { workers: Worker[] }): JSX.Element {
  const machines = machinesOf(workers);
  return (
    <div class="pools">
      {POOLS.map(([pool, title]) => {
        const own = workers.filter((worker) => worker.pool === pool).sort((a, b) => a.id.localeCompare(b.id));
        const busy = own.filter((worker) => worker.job).length;
        return (
          <section key={pool} class="card pool">
            <h2>
              {title} <small class="dim">{pool === "env" || pool === "reference" ? own.length : `${busy} of ${own.length} leased`}</small>
            </h2>
            {own.length === 0 && <p class="waits">None running. Jobs that need one wait.</p>}
            <ul>
              {own.map((worker) => (
                <WorkerLine key={worker.id} worker={worker} />
              ))}
            </ul>
          </section>
        );
      })}
      <section class="card pool">
        <h2>Machines</h2>
        <ul>
          {machines.map(({ name, count, cores, gpus }) => (
            <li key={name}>
              <b>{name}</b>{" "}
              <small>
                {counted(count, "worker")} · {cores > 0 && `${counted(cores, "core")} · `}
                {gpus.size ? [...gpus.values()].map((gpu) => `${gpu.model} ${bytes(gpu.memory)}`).join(", ") : "no GPU"}
              </small>
            </li>
          ))}
        </ul>
      </section>
    </div>
  );
}

function WorkerLine({ worker }: { worker: Worker }): JSX.Element {
  const job = worker.lease?.job ?? worker.job;
  const sessions = worker.detail["sessions"];
  const capacity = worker.detail["capacity"];
  return (
    <li>
      <i class={`dot ${worker.status}`} />
      <b>{worker.id}</b> <small class="dim">{worker.status}</small>{" "}
      {job && (
        <small>
          → <a href={`#/jobs/${job}`}>{job}</a>
          {worker.lease ? ` epoch ${worker.lease.epoch}` : ""}
          {worker.lease?.leaves_by ? ", releasing" : ""}
        </small>
      )}
      {typeof sessions === "number" && (
        <small>
          {" "}
          {sessions}
          {typeof capacity === "number" ? ` of ${capacity}` : ""} sessions
        </small>
      )}
      {worker.gpus.length > 0 && <small> GPU {worker.gpus.map((gpu) => gpu.index).join(", ")}</small>}
      <small class="dim">
        {" "}
        {worker.host}:{worker.pid}
      </small>
    </li>
  );
}

const QUEUE_COLUMNS: Column<Queue>[] = [
  [
    "Stream",
    ({ stream }) => (
      <>
        {QUEUES[stream] ?? ""} <code class="dim">{stream}</code>
      </>
    ),
  ],
  ["Messages", (queue) => queue.messages.toLocaleString()],
  ["Size", (queue) => bytes(queue.bytes)],
  ["Largest part", ({ subjects }) => Object.entries(subjects).sort((a, b) => b[1] - a[1]).slice(0, 2).map(largest)],
];

function largest([subject, count]: [string, number]): JSX.Element {
  return (
    <small key={subject} class="pair">
      <code>{subject}</code> {count}
    </small>
  );
}

function Queues({ queues }: { queues: Queue[] }): JSX.Element {
  return (
    <section class="card">
      <h2>Queues</h2>
      <Table of={QUEUE_COLUMNS} rows={queues} by={(queue) => queue.stream} />
    </section>
  );
}
