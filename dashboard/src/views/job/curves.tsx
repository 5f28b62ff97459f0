// A job's curves, live; beside them, if asked for, those of other jobs.

import type { JSX } from "preact";
import { useEffect, useMemo, useReducer, useState } from "preact/hooks";
import { Chart, type Look } from "../../chart.tsx";
import { useAsked } from "../../hooks.ts";
import { job as path } from "../../lib/api.ts";
import { Follow } from "../../lib/live/follow.ts";
import { MODEL_PANELS } from "../../lib/curves/models.ts";
import { PANELS, single, type Panel } from "../../lib/curves/panels.ts";
import { ALL, linesOf, namesOf, partsOf } from "../../lib/curves/policies.ts";
import { rewinds, REWOUND, type Mark } from "../../lib/curves/rewinds.ts";
import { began, type Axis, type Line } from "../../lib/curves/series.ts";
import { FINAL, type Event, type Job, type JobDetail } from "../../lib/types.ts";
import { Choice, Empty } from "../../parts.tsx";
import { PayoffMatrix } from "./payoffs.tsx";
import { PoolMembers } from "./pools.tsx";

const SMOOTH = [0, 0.6, 0.9, 0.97];
const MOST_COMPARED = 4;
/** Jobs from which to choose. */
const OFFERED = 200;
const POLL_S = 15;

export function Curves({ job, follow }: { job: JobDetail; follow: Follow }): JSX.Element {
  const [look, setLook] = useState<Look>({ axis: "step", smooth: 0, log: false });
  const [compared, setCompared] = useState<Job[]>([]);
  const [more, setMore] = useState<string[]>([]);
  const [policy, setPolicy] = useState(ALL);
  const others = useFollows(compared);
  const panels = useMemo(() => [...(job.kind === "tinker" ? MODEL_PANELS : []), ...PANELS, ...more.map(single)], [job.kind, more]);
  const change = (part: Partial<Look>): void => setLook({ ...look, ...part });
  const version = follow.joined.version;
  const all = useMemo(() => namesOf(follow.joined), [version === 0, Math.floor(version / 200), follow]);
  const policies = [...partsOf(follow.joined).own.keys()];
  const marks = useRewinds(job, follow, look.axis);
  return (
    <>
      <div class="bar">
        <Choice<Axis> label="x" value={look.axis} of={["step", "time"]} choose={(axis) => change({ axis })} />
        <Choice label="smooth" value={look.smooth} of={SMOOTH} say={(one) => (one ? String(one) : "off")} choose={(smooth) => change({ smooth })} />
        {policies.length > 0 && (
          <Choice label="policy" value={policy} of={[ALL, ...policies]} say={(name) => name || "all"} choose={setPolicy} />
        )}
        <label class="check">
          <input type="checkbox" checked={look.log} onChange={(event) => change({ log: event.currentTarget.checked })} /> log
        </label>
        <Compare job={job} compared={compared} set={setCompared} />
        <input
          list="metric-names"
          placeholder="Another metric…"
          aria-label="Another metric"
          onChange={(event) => {
            const name = event.currentTarget.value;
            if (all.includes(name) && !more.includes(name)) setMore([...more, name]);
            event.currentTarget.value = "";
          }}
        />
        <datalist id="metric-names">
          {all.map((name) => (
            <option key={name} value={name} />
          ))}
        </datalist>
      </div>
      {version === 0 && <Empty>{follow.way === "loading" ? "Loading…" : noMetrics(job)}</Empty>}
      {marks.length > 0 && <p class="dim">The job went back (dotted lines): {marks.map(({ text }) => text).join(", ")}.</p>}
      <PayoffMatrix follow={follow} />
      <PoolMembers job={job} />
      <div class="charts">
        {panels.map((panel) => (
          <PanelChart key={panel.title} panel={panel} look={look} policy={policy} follow={follow} others={others} compared={compared} marks={marks} />
        ))}
      </div>
    </>
  );
}

function noMetrics(job: Job): string {
  if (FINAL.includes(job.state)) return `This job ended without metrics (${job.state}). See its log.`;
  if (job.kind === "inference") return "No metrics before the first request.";
  if (job.kind === "tinker") return "No metrics before the first pass of a client.";
  return `No metrics before the first ${job.kind === "eval" ? "result" : "step"}.`;
}

interface PanelProps {
  panel: Panel;
  look: Look;
  policy: string;
  follow: Follow;
  others: Follow[];
  compared: Job[];
  marks: Mark[];
}

function PanelChart({ panel, look, policy, follow, others, compared, marks }: PanelProps): JSX.Element {
  const versions = [follow, ...others].map((one) => `${one.job}:${one.joined.version}`).join();
  const lines = useMemo(() => {
    const own = linesOf(panel, follow.joined, look.axis, policy);
    const beside = others.flatMap((other) => {
      const name = compared.find((one) => one.id === other.job);
      const drawn: Line[] = linesOf(panel, other.joined, look.axis, policy).map(
        ({ low: _low, high: _high, colour: _colour, pattern: _pattern, ...line }) => line,
      );
      return drawn.map((line) => ({ ...line, label: `${line.label} · ${name?.name ?? ""} ${other.job}`, other: true }));
    });
    return [...own, ...beside];
  }, [versions, look.axis, policy, panel]);
  return <Chart title={panel.title} about={panel.about} lines={lines} look={look} positive={panel.positive} marks={marks} />;
}

/** Where the job went back to a checkpoint, as its log of events says. */
function useRewinds(job: Job, follow: Follow, axis: Axis): Mark[] {
  const isPolled = follow.way === "polling" && !FINAL.includes(job.state);
  const { value, again } = useAsked<{ events: Event[] }>(path(job.id, "/events?format=json"), isPolled ? POLL_S : 0);
  useEffect(() => follow.hear("events", (noun) => (noun as { event: Event }).event.event === REWOUND && again()), [follow, again]);
  const begun = began(follow.joined);
  return useMemo(() => rewinds(value?.events ?? [], axis, begun), [value, axis, begun]);
}

function Compare({ job, compared, set }: { job: Job; compared: Job[]; set: (jobs: Job[]) => void }): JSX.Element {
  const [text, setText] = useState("");
  const { value } = useAsked<{ jobs: Job[] }>(`/v1/jobs?limit=${OFFERED}&search=${encodeURIComponent(text.trim())}`, 10);
  useEffect(() => {
    const newest = compared.map((one) => value?.jobs.find((two) => two.id === one.id) ?? one);
    if (newest.some((one, i) => one.state !== compared[i]!.state)) set(newest);
  }, [value, compared]);
  const rest = (value?.jobs ?? []).filter((one) => one.id !== job.id && !compared.some((two) => two.id === one.id));
  useEffect(() => {
    const chosen = rest.find((one) => one.id === text.trim());
    if (!chosen) return;
    setText("");
    set([...compared, chosen]);
  }, [value, text]);
  return (
    <>
      {compared.map((one) => (
        <button key={one.id} class="chip" title="Remove from the comparison" onClick={() => set(compared.filter((two) => two.id !== one.id))}>
          {one.name} {one.id} ×
        </button>
      ))}
      <input
        type="search"
        aria-label="Compare with"
        placeholder="compare with…"
        maxLength={200}
        list="comparable"
        value={text}
        disabled={compared.length >= MOST_COMPARED}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <datalist id="comparable">
        {rest.map((one) => (
          <option key={one.id} value={one.id} label={`${one.name} (${one.state})`} />
        ))}
      </datalist>
    </>
  );
}

/** Other jobs, followed while they are wanted and not over. */
function useFollows(jobs: Job[]): Follow[] {
  const [made] = useState(() => new Map<string, Follow>());
  const [, draw] = useReducer((n: number) => n + 1, 0);
  const wanted = jobs.map((one) => `${one.id}:${one.state}`).join();
  useEffect(() => {
    for (const { id, state } of jobs) {
      if (!made.has(id)) {
        const follow = new Follow(id);
        let timer = 0;
        follow.watch(() => (timer ||= window.setTimeout(() => ((timer = 0), draw(undefined)), 500)));
        made.set(id, follow);
      }
      if (FINAL.includes(state)) made.get(id)!.end();
    }
    for (const [id, follow] of made)
      if (!jobs.some((one) => one.id === id)) {
        follow.close();
        made.delete(id);
      }
    draw(undefined);
  }, [wanted]);
  useEffect(() => () => made.forEach((follow) => follow.close()), []);
  return jobs.flatMap(({ id }) => made.get(id) ?? []);
}
