// What happened to a job and what its services said, in one log.

import type { JSX } from "preact";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { useHeard } from "../../hooks.ts";
import { ask, job as path } from "../../lib/api.ts";
import type { Beside, Follow } from "../../lib/live/follow.ts";
import type { Event, Json, JobDetail } from "../../lib/types.ts";
import { clock, counted, moment } from "../../lib/words.ts";
import { Empty, Search, Select } from "../../parts.tsx";

interface Line {
  key: string;
  time: number;
  level: string;
  who: string;
  event: string;
  rest: string;
  trace: string;
}

const LEVELS = ["event", "debug", "info", "warning", "error", "critical"];
const LOOK_MS = 2000;
const HEARD: Beside[] = ["events", "logs"];
const SHOWN = 1000;
const KEPT = 5000;

export function Log({ job, follow }: { job: JobDetail; follow: Follow | null }): JSX.Element {
  const lines = useLines(job.id, follow);
  const [level, setLevel] = useState("debug");
  const [text, setText] = useState("");
  const floor = LEVELS.indexOf(level);
  const wanted = text.toLowerCase();
  const shown = lines.filter((line) => {
    const grave = line.level === "event" || LEVELS.indexOf(line.level) >= floor;
    return grave && (!wanted || `${line.who} ${line.event} ${line.rest} ${line.trace}`.toLowerCase().includes(wanted));
  });
  return (
    <>
      <div class="bar">
        <Search label="Search the log" placeholder="Search the log…" value={text} set={setText} />
        <Select label="Level" value={level} of={LEVELS.slice(1).map((one) => [one, `${one} and above`])} choose={setLevel} />
        <small class="dim">
          {counted(shown.length, "line")}{shown.length > SHOWN ? `, showing the last ${SHOWN}` : ""}
          {lines.length === KEPT ? `; for older ones: opentinker logs ${job.id}` : ""}
        </small>
      </div>
      {shown.length === 0 && <Empty>{lines.length ? "No line matches: search for other words, or choose a lower level." : "No lines yet: services write here while they work on the job."}</Empty>}
      <ol class="card log" tabIndex={0} aria-label="Log">
        {shown.slice(-SHOWN).map((line) => (
          <li key={line.key} class={line.level}>
            <time title={moment(line.time)}>{clock(line.time)}</time>
            <span class="level">{line.level}</span>
            <span class="who">{line.who}</span>
            <span class="said">
              <b>{line.event}</b> {line.rest}
              {line.trace && (
                <details>
                  <summary>traceback</summary>
                  <pre>{line.trace}</pre>
                </details>
              )}
            </span>
          </li>
        ))}
      </ol>
    </>
  );
}

interface Said {
  cursor: number;
  time: number;
  level: string;
  service: string;
  worker: string;
  event: string;
  fields: Record<string, Json>;
  trace: string;
}

/** What there is, and more as soon as the job is heard to say something; in any case every LOOK_MS. */
function useLines(job: string, follow: Follow | null): Line[] {
  const [lines, set] = useState<Line[]>([]);
  const at = useRef({ event: "0", line: 0 });
  const look = useRef(() => {});
  useHeard(follow, HEARD, useCallback(() => look.current(), []));
  useEffect(() => {
    let over = false;
    let timer = 0;
    let looking = false;
    const read = async (): Promise<void> => {
      if (looking) return;
      looking = true;
      clearTimeout(timer);
      try {
        const [events, logs] = await Promise.all([
          ask<{ events: Event[] }>(path(job, `/events?format=json&after=${at.current.event}`)),
          ask<{ lines: Said[]; cursor: number }>(path(job, `/logs?format=json&limit=5000&after=${at.current.line}`)),
        ]);
        if (over) return;
        at.current = { event: events.events[events.events.length - 1]?.id ?? at.current.event, line: logs.cursor };
        const fresh = [...events.events.map(ofEvent), ...logs.lines.map(ofLine)];
        if (fresh.length) set((before) => newest(before, fresh));
      } catch {
        // the head of the page says that the server is away; asked again below
      }
      looking = false;
      if (!over) timer = window.setTimeout(() => void read(), LOOK_MS);
    };
    look.current = () => void read();
    void read();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [job]);
  return lines;
}

/** By time; those that come are nearly always the last. */
function newest(before: Line[], fresh: Line[]): Line[] {
  return [...before, ...fresh].sort((a, b) => a.time - b.time).slice(-KEPT);
}

function pairs(fields: Record<string, Json>): string {
  return Object.entries(fields)
    .filter(([, value]) => value !== "" && value !== null)
    .map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`)
    .join(" ");
}

function ofEvent(event: Event): Line {
  const { id, event: name, time, ...rest } = event;
  return { key: `e${id}`, time, level: "event", who: "job", event: name, rest: pairs(rest), trace: "" };
}

function ofLine(line: Said): Line {
  return {
    key: `l${line.cursor}`,
    time: line.time,
    level: line.level,
    who: line.worker || line.service,
    event: line.event,
    rest: pairs(line.fields),
    trace: line.trace,
  };
}
