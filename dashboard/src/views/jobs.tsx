// All jobs: what they are, how far, and what they wait for.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { go, useAsked, useKeyNames, useNow, useSettled } from "../hooks.ts";
import { secondsLeft } from "../lib/pace.ts";
import { reported } from "../lib/policies.ts";
import { FINAL, type Job } from "../lib/types.ts";
import { ago, counted, duration, moment, short } from "../lib/words.ts";
import { Empty, Head, Progress, Said, Select, State } from "../parts.tsx";

const STATES = ["", "running", "queued", "starting", "paused", "succeeded", "failed", "cancelled"];
const PAGE = 200;
const LOOK_S = 2;
/** A filter is more work for the server. */
const SLOW_S = 5;
const SETTLED_MS = 300;

interface Answer {
  jobs: Job[];
  cursor: string;
  more: boolean;
}

export function Jobs(): JSX.Element {
  const [text, setText] = useState("");
  const [state, setState] = useState("");
  const search = useSettled(text.trim(), SETTLED_MS);
  const filter = `${state && `&state=${state}`}${search && `&search=${encodeURIComponent(search)}`}`;
  return (
    <>
      <h1 class="unseen">Jobs</h1>
      <div class="bar">
        <input
          type="search"
          maxLength={200}
          placeholder="Name, id, kind, environment, model, key's id…"
          aria-label="Search jobs"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
        />
        <Select label="State" value={state} of={STATES.map((one) => [one, one || "any state"])} choose={setState} />
      </div>
      <Found key={filter} filter={filter} />
    </>
  );
}

function Found({ filter }: { filter: string }): JSX.Element {
  const { value, problem } = useAsked<Answer>(`/v1/jobs?limit=${PAGE}${filter}`, filter ? SLOW_S : LOOK_S);
  const [older, setOlder] = useState<Job[]>([]);
  const [before, setBefore] = useState<string | null>(null);
  const page = useAsked<Answer>(before && `/v1/jobs?limit=${PAGE}&before=${before}${filter}`);
  const keyName = useKeyNames();
  const now = useNow(5);
  if (!value) return problem ? <Said problem={problem} /> : <Empty>…</Empty>;
  const fresh = new Set(value.jobs.map((job) => job.id));
  const behind = [...older, ...(page.value?.jobs ?? [])].filter((job) => !fresh.has(job.id));
  const shown = [...value.jobs, ...behind];
  const last = page.value ?? value;
  const count = counted(shown.length, "job");
  return (
    <>
      <Said problem={problem ?? page.problem} />
      {shown.length === 0 ? (
        <Empty>
          {!filter ? "No jobs yet. Submit one: opentinker submit examples/copy_digits.toml" : last.more ? "None of the newest jobs matches." : "No job matches."}
        </Empty>
      ) : (
        <table class="card jobs">
          <Head of={["Job", "State", "Progress", "Last", "Time", "Owner"]} />
          <tbody>
            {shown.map((job) => (
              <Row key={job.id} job={job} now={now} owner={keyName(job.key)} />
            ))}
          </tbody>
        </table>
      )}
      <p class="dim count">{!last.more ? count : filter ? `${count} so far; older ones not searched yet` : `the newest ${count}`}</p>
      {last.more && (
        <button
          class="more"
          onClick={() => {
            setOlder(behind);
            setBefore(last.cursor);
          }}
        >
          {filter ? "Search older jobs" : "Older jobs"}
        </button>
      )}
    </>
  );
}

function Row({ job, now, owner }: { job: Job; now: number; owner: string }): JSX.Element {
  const over = FINAL.includes(job.state);
  const spent = (job.finished ?? now) - job.created;
  const left = secondsLeft(job, now);
  const progress = reported(job);
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
      <td data-label="Progress">{job.kind === "inference" ? <small class="dim">serves</small> : <Progress {...job} />}</td>
      <td data-label="Last">
        {progress.map(([name, value]) => (
          <small key={name} class="pair">
            {name} <b>{short(value)}</b>
          </small>
        ))}
      </td>
      <td data-label="Time">
        <span title={moment(job.created)}>{duration(spent)}</span>
        <small class="dim"> {left !== null ? `${duration(left)} left` : over ? `ended ${ago(job.finished ?? now, now)}` : ""}</small>
      </td>
      <td data-label="Owner">
        <small>
          {owner || "–"}
          {job.priority ? ` · priority ${job.priority}` : ""}
        </small>
      </td>
    </tr>
  );
}
