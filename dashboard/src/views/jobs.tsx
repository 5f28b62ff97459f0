// All jobs: what they are, how far, and what they wait for.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { go, useAsked, useNow } from "../hooks.ts";
import { FINAL, type Job } from "../lib/types.ts";
import { ago, duration, moment, short } from "../lib/words.ts";
import { Empty, Progress, Said, State } from "../parts.tsx";

const STATES = ["", "running", "queued", "starting", "paused", "succeeded", "failed", "cancelled"];
const PAGE = 200;

export function Jobs(): JSX.Element {
  const { value, problem } = useAsked<{ jobs: Job[]; cursor: string; more: boolean }>(`/v1/jobs?limit=${PAGE}`, 2);
  const [older, setOlder] = useState<Job[]>([]);
  const [before, setBefore] = useState<string | null>(null);
  const page = useAsked<{ jobs: Job[]; cursor: string; more: boolean }>(before && `/v1/jobs?limit=${PAGE}&before=${before}`);
  const [text, setText] = useState("");
  const [state, setState] = useState("");
  const now = useNow(5);
  if (!value) return problem ? <Said problem={problem} /> : <Empty>…</Empty>;
  const fresh = new Set(value.jobs.map((job) => job.id));
  const behind = [...older, ...(page.value?.jobs ?? [])].filter((job) => !fresh.has(job.id));
  const all = [...value.jobs, ...behind];
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = all.filter((job) => {
    const about = `${job.id} ${job.name} ${job.kind} ${job.model} ${job.environment ?? ""} ${job.key} ${job.tenant}`.toLowerCase();
    return (!state || job.state === state) && words.every((word) => about.includes(word));
  });
  const last = page.value ?? value;
  return (
    <>
      <Said problem={problem} />
      <div class="bar">
        <input
          type="search"
          placeholder="Name, id, kind, environment, model, key…"
          aria-label="Search jobs"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
        />
        <select aria-label="State" value={state} onChange={(event) => setState(event.currentTarget.value)}>
          {STATES.map((one) => (
            <option key={one} value={one}>
              {one || "any state"}
            </option>
          ))}
        </select>
        <small class="dim">
          {shown.length} of {all.length}
          {last.more ? "+" : ""}
        </small>
      </div>
      {shown.length === 0 ? (
        <Empty>{all.length ? "No job is like that." : "No jobs yet: opentinker submit examples/copy_digits.toml"}</Empty>
      ) : (
        <table class="card jobs">
          <thead>
            <tr>
              <th>Job</th>
              <th>State</th>
              <th>Progress</th>
              <th>Last</th>
              <th>Time</th>
              <th>Owner</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((job) => (
              <Row key={job.id} job={job} now={now} />
            ))}
          </tbody>
        </table>
      )}
      {last.more && (
        <button
          class="more"
          onClick={() => {
            setOlder(behind);
            setBefore(last.cursor);
          }}
        >
          Older jobs
        </button>
      )}
    </>
  );
}

function Row({ job, now }: { job: Job; now: number }): JSX.Element {
  const over = FINAL.includes(job.state);
  const spent = (job.finished ?? now) - job.created;
  const left = !over && job.step > 0 && job.steps ? (spent / job.step) * (job.steps - job.step) : null;
  const progress = Object.entries(job.progress).slice(0, 2);
  return (
    <tr onClick={(event) => (event.target instanceof HTMLAnchorElement ? undefined : go("jobs", job.id))}>
      <td data-label="Job">
        <a href={`#/jobs/${job.id}`}>{job.name}</a>
        <small class="dim">
          {" "}
          {job.id} · {job.kind}
          {job.environment ? ` · ${job.environment}` : ""}
        </small>
        {job.waiting_for && <small class="waits">waits for {job.waiting_for}</small>}
        {over && job.state !== "succeeded" && job.reason && <small class="waits">{job.reason}</small>}
      </td>
      <td data-label="State">
        <State state={job.state} />
      </td>
      <td data-label="Progress">{job.kind === "inference" ? <small class="dim">serves</small> : <Progress job={job} />}</td>
      <td data-label="Last">
        {progress.map(([name, value]) => (
          <small key={name} class="pair">
            {name} <b>{short(value)}</b>
          </small>
        ))}
      </td>
      <td data-label="Time">
        <span title={moment(job.created)}>{duration(spent)}</span>
        <small class="dim"> {left !== null ? `${duration(left)} left` : over ? ago(job.finished ?? now, now) : ""}</small>
      </td>
      <td data-label="Owner">
        <small>
          {job.key || "–"}
          {job.priority ? ` · priority ${job.priority}` : ""}
        </small>
      </td>
    </tr>
  );
}
