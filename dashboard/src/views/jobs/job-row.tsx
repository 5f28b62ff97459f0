// One job in the list: a row of one line.

import { Component, type JSX } from "preact";
import { go } from "../../hooks.ts";
import { secondsLeft } from "../../lib/jobs/pace.ts";
import { reported } from "../../lib/curves/policies.ts";
import { sparkline } from "../../lib/jobs/rows.ts";
import type { Label } from "../../lib/jobs/view.ts";
import { ENDLESS, FINAL, type Job } from "../../lib/types.ts";
import { ago, duration, moment, short } from "../../lib/words.ts";
import { Progress, State } from "../../parts.tsx";

/** Of every row; style.css keeps to it. */
export const ROW_PX = 36;
/** Those that may be left out. */
export const COLUMNS = ["State", "Progress", "Last", "Curve", "Time", "Kind", "Environment", "Model", "Project", "Owner", "Notes", "Updated", "Finished"];
const CURVE = { width: 90, height: 20 };

interface RowProps {
  job: Job;
  now: number;
  owner: string;
  columns: string[];
  isChosen: boolean;
  isAt: boolean;
  deeds: { current: { pick: (id: string, shift: boolean) => void; choose: (label: Label) => void } };
}

/** Drawn again only if something that it shows has changed: scrolling moves hundreds of rows. */
export class JobRow extends Component<RowProps> {
  override shouldComponentUpdate(next: RowProps): boolean {
    return Object.keys(next).some((name) => next[name as keyof RowProps] !== this.props[name as keyof RowProps]);
  }

  override render({ job, now, owner, columns, isChosen, isAt, deeds }: RowProps): JSX.Element {
    const choose = (label: Label): void => deeds.current.choose(label);
    const opens = (event: MouseEvent): void => {
      if (!(event.target instanceof HTMLElement && event.target.closest("a, button, input"))) go("jobs", job.id);
    };
    return (
      <tr class={isAt ? "at" : undefined} aria-selected={isChosen} onClick={opens}>
        <td data-label="">
          <input type="checkbox" aria-label={`Select ${job.name}`} checked={isChosen} onClick={(event) => deeds.current.pick(job.id, event.shiftKey)} />
        </td>
        <td data-label="Job">
          <Named job={job} choose={choose} />
        </td>
        {columns.map((name) => (
          <td key={name} data-label={name}>
            {CELLS[name]!({ job, now, owner, choose })}
          </td>
        ))}
      </tr>
    );
  }
}

function Named({ job, choose }: { job: Job; choose: (label: Label) => void }): JSX.Element {
  const why = job.waiting_for ? `waits for ${job.waiting_for}` : FINAL.includes(job.state) && job.state !== "succeeded" ? job.reason : "";
  return (
    <div class="named">
      <a href={`#/jobs/${job.id}`} title={job.name}>
        {job.name}
      </a>
      <small class="dim">
        {job.id} · <Value label={["kind", job.kind]} choose={choose} />
      </small>
      {job.tags.map((tag) => (
        <button key={tag} class="chip label" title="Only jobs of this tag" onClick={() => choose(["tag", tag])}>
          {tag}
        </button>
      ))}
      {why && (
        <small class="waits" title={why}>
          {why}
        </small>
      )}
    </div>
  );
}

/** A value of a job; a click shows only the jobs that have it. */
function Value({ label, text, choose }: { label: Label; text?: string; choose: (label: Label) => void }): JSX.Element {
  return (
    <button class="value" title={`Only jobs of this ${label[0]}: ${label[1]}`} onClick={() => choose(label)}>
      {text ?? label[1]}
    </button>
  );
}

function Moment({ at, now }: { at: number; now: number }): JSX.Element {
  return <small title={moment(at)}>{ago(at, now)}</small>;
}

interface CellProps {
  job: Job;
  now: number;
  owner: string;
  choose: (label: Label) => void;
}

const CELLS: Record<string, (props: CellProps) => JSX.Element> = {
  State: ({ job }) => <State state={job.state} />,
  Progress: ({ job }) => (ENDLESS.includes(job.kind) ? <small class="dim">serves</small> : <Progress {...job} />),
  Last: ({ job }) => (
    <span title={reported(job).map(([name, value]) => `${name} ${short(value)}`).join(", ")}>
      {reported(job).map(([name, value]) => (
        <small key={name} class="pair">
          {name} <b>{short(value)}</b>
        </small>
      ))}
    </span>
  ),
  Curve: ({ job }) =>
    job.curve.length > 1 ? (
      <svg class="curve" width={CURVE.width} height={CURVE.height} role="img" aria-label="curve">
        <polyline points={sparkline(job.curve, CURVE.width, CURVE.height - 2)} />
      </svg>
    ) : (
      <></>
    ),
  Time: ({ job, now }) => {
    const left = secondsLeft(job, now);
    const taken = duration((job.finished ?? now) - job.created);
    return (
      <>
        <span title={moment(job.created)}>{job.finished === null ? `for ${taken}` : `took ${taken}`}</span>
        <small class="dim"> {left !== null ? `${duration(left)} left` : job.finished !== null ? `ended ${ago(job.finished, now)}` : ""}</small>
      </>
    );
  },
  Kind: ({ job, choose }) => <Value label={["kind", job.kind]} choose={choose} />,
  Environment: ({ job, choose }) => (job.environment ? <Value label={["environment", job.environment]} choose={choose} /> : <></>),
  Model: ({ job, choose }) => <Value label={["model", job.model]} text={job.model.split("/").at(-1)!} choose={choose} />,
  Project: ({ job, choose }) =>
    job.project ? (
      <button class="chip label" title="Only jobs of this project" onClick={() => choose(["project", job.project])}>
        {job.project}
      </button>
    ) : (
      <></>
    ),
  Owner: ({ job, owner, choose }) => (
    <small>
      {job.key ? <Value label={["owner", job.key]} text={owner} choose={choose} /> : "–"}
      {job.priority ? ` · priority ${job.priority}` : ""}
    </small>
  ),
  Notes: ({ job }) => (
    <small class="noted" title={job.notes}>
      {job.notes}
    </small>
  ),
  Updated: ({ job, now }) => <Moment at={job.updated} now={now} />,
  Finished: ({ job, now }) => (job.finished === null ? <></> : <Moment at={job.finished} now={now} />),
};
