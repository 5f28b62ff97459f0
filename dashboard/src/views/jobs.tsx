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
/** By the API's name of the order. */
const SORTS: [string, string][] = [
  ["created", "newest first"],
  ["state", "running first"],
  ["updated", "last changed first"],
  ["name", "by name"],
  ["project", "by project"],
  ["environment", "by environment"],
  ["model", "by model"],
];
const PAGE = 200;
const LOOK_S = 2;
/** A filter is more work for the server. */
const SLOW_S = 5;
const SETTLED_MS = 300;

/** A project or a tag that listed jobs have. */
type Label = ["project" | "tag", string];

interface Answer {
  jobs: Job[];
  cursor: string;
  more: boolean;
}

export function Jobs(): JSX.Element {
  const [text, setText] = useState("");
  const [state, setState] = useState("");
  const [sort, setSort] = useState(SORTS[0]![0]);
  const [labels, setLabels] = useState<Label[]>([]);
  const without = ([kind, name]: Label): Label[] => labels.filter(([other, value]) => other !== kind || (kind === "tag" && value !== name));
  const query = new URLSearchParams(labels.filter(([kind]) => kind === "project"));
  const tags = labels.filter(([kind]) => kind === "tag").map(([, name]) => name);
  if (tags.length) query.set("tag", tags.join(","));
  if (sort !== SORTS[0]![0]) query.set("sort", sort);
  const search = useSettled(text.trim(), SETTLED_MS);
  if (state) query.set("state", state);
  if (search) query.set("search", search);
  const filter = query.size ? `&${query}` : "";
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
        <Select label="Order" value={sort} of={SORTS} choose={setSort} />
        <a href="#/sweeps">Sweeps</a>
        {labels.map((label) => (
          <button key={label.join()} class="chip" title="Remove from the filter" onClick={() => setLabels(without(label))}>
            {label.join(": ")} ×
          </button>
        ))}
      </div>
      <Found key={filter} filter={filter} choose={(label) => setLabels([...without(label), label])} />
    </>
  );
}

function Found({ filter, choose }: { filter: string; choose: (label: Label) => void }): JSX.Element {
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
              <Row key={job.id} job={job} now={now} owner={keyName(job.key)} choose={choose} />
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

interface RowProps {
  job: Job;
  now: number;
  owner: string;
  choose: (label: Label) => void;
}

function Row({ job, now, owner, choose }: RowProps): JSX.Element {
  const labels: Label[] = [...(job.project ? [["project", job.project] as Label] : []), ...job.tags.map((tag): Label => ["tag", tag])];
  const over = FINAL.includes(job.state);
  const spent = (job.finished ?? now) - job.created;
  const left = secondsLeft(job, now);
  const progress = reported(job);
  return (
    <tr onClick={(event) => (event.target instanceof HTMLElement && event.target.closest("a, button") ? undefined : go("jobs", job.id))}>
      <td data-label="Job">
        <a href={`#/jobs/${job.id}`}>{job.name}</a>
        <small class="dim">
          {" "}
          {job.id} · {job.kind}
          {job.environment ? ` · ${job.environment}` : ""}
        </small>
        {labels.map(([kind, name]) => (
          <button key={`${kind}${name}`} class="chip label" title={`Only jobs of this ${kind}`} onClick={() => choose([kind, name])}>
            {name}
          </button>
        ))}
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
