// What each worker of a job is busy with, second by second, live: where there is nothing, or red, somebody waits.

import type { JSX } from "preact";
import { useEffect, useReducer, useRef, useState } from "preact/hooks";
import { ask, job as path } from "../../lib/api.ts";
import type { Follow } from "../../lib/live/follow.ts";
import { sizeOf } from "../../lib/live/join.ts";
import { folded, large } from "../../lib/timeline/fold.ts";
import { busyShare, IDLE, isOf, isSame, Lanes, lookBack, nearest, stepped, within, type Hole, type Part, type Picked, type Row, type Segment } from "../../lib/timeline/lanes.ts";
import { Refill } from "../../lib/live/refill.ts";
import { FINAL, type JobDetail } from "../../lib/types.ts";
import { clock, counted, duration } from "../../lib/words.ts";
import { Choice, Empty } from "../../parts.tsx";
import { coloured, useTheme } from "../../theme.ts";

const WINDOWS = [10, 30, 120, 600];
const ROW = 26;
const LEAST = 0.3;
const DRAW_MS = 250;
const HATCH = 7;
/** So many pixels beside a segment still mean it. */
const NEAR = 8;
const KEYS = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"];
const KINDS: [string, string, string][] = [
  ["rollout", "--c1", "rollout"],
  ["evaluation", "--c6", "evaluation"],
  ["open", "--c10", "environment opens"],
  ["turn", "--c9", "environment's turn"],
  ["step", "--c3", "training step"],
  ["wait", "--bad", "trainer waits"],
  ["queue", "--warn", "waits for other jobs"],
  ["tickets", "--dim", "rollout worker waits"],
  ["checkpoint", "--c8", "checkpoint"],
  ["score", "--c5", "reference"],
  ["publish", "--c2", "publish weights"],
  ["transfer", "--c7", "transfer"],
  ["load", "--c4", "pause, load, resume, sleep, wake"],
  ["loading", "--dim", "model loads"],
];
const COLOUR = new Map<string, string>([...KINDS.map(([kind, colour]) => [kind, colour] as const), ...["pause", "resume", "sleep", "wake"].map((kind) => [kind, "--c4"] as const), ...["exams", "weights", "store"].map((kind) => [kind, "--dim"] as const)]);

export function Timeline({ job, follow }: { job: JobDetail; follow: Follow }): JSX.Element {
  const { lanes, problem } = useLanes(job, follow);
  const [span, setSpan] = useState(30);
  const [held, setHeld] = useState<number | null>(null);
  const skew = useRef(Infinity);
  const over = FINAL.includes(job.state);
  const last = lanes.end;
  if (last) skew.current = Math.min(skew.current, Date.now() / 1000 - last);
  const live = !over && last > 0 && Date.now() / 1000 - last - skew.current < 30;
  const to = held ?? (live ? Date.now() / 1000 - skew.current - 1 : last);
  const move = (share: number): void => setHeld(Math.min(last, to + span * share));
  return (
    <>
      <div class="bar">
        <Choice label="window" value={span} of={WINDOWS} say={duration} choose={setSpan} />
        <button aria-label="Earlier" onClick={() => move(-0.5)}>
          ‹
        </button>
        <button aria-label="Later" onClick={() => move(0.5)} disabled={held === null}>
          ›
        </button>
        <label class="check">
          <input type="checkbox" checked={held === null} onChange={(event) => setHeld(event.currentTarget.checked ? null : to)} /> follow
        </label>
        <span class="legend">
          {KINDS.map(([kind, colour, words]) => (
            <span key={kind} class="key">
              <i style={{ background: `var(${colour})` }} />
              {words}
            </span>
          ))}
        </span>
      </div>
      {problem && <p class="problem">{problem}</p>}
      {lanes.rows.length === 0 ? <Empty>No activity yet. Workers report it once a second.</Empty> : <Rows lanes={lanes} from={to - span} to={to} />}
      <Missing lanes={lanes} />
      {lanes.leftOut > 0 && <p class="dim">{lanes.leftOut} shorter segments are left out.</p>}
    </>
  );
}

/** Of the messages themselves: where they would lie is hatched. */
function Missing({ lanes }: { lanes: Lanes }): JSX.Element | null {
  const fetching = sizeOf(lanes.gaps());
  const lost = lanes.missing;
  if (!fetching && !lost) return null;
  return (
    <p class="note" role="status">
      Hatched: activity unknown, because messages are missing.
      {fetching > 0 && ` ${counted(fetching, "message")} being fetched.`}
      {lost > 0 && ` ${lost} lost.`}
    </p>
  );
}

function Rows({ lanes, from, to }: { lanes: Lanes; from: number; to: number }): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [hover, setHover] = useState<{ x: number; row: number } | null>(null);
  const [picked, setPicked] = useState<Picked | null>(null);
  const [open, setOpen] = useState<ReadonlySet<string>>(new Set());
  const theme = useTheme();
  const holes = lanes.holes();
  const rows = folded(lanes.rows, open, from, to);
  useEffect(() => {
    if (canvas.current) draw(canvas.current, rows, from, to, holes, picked);
  });
  const timeAt = (x: number): number => from + (x / canvas.current!.clientWidth) * (to - from);
  const at = hover && canvas.current ? timeAt(hover.x) : null;
  const row = hover ? rows[hover.row] : undefined;
  const found = row && at !== null ? within(row, at, at + 1e-6) : [];
  const unknown = row && at !== null && holes.some((one) => isOf(row, one.worker) && one.from <= at && at < one.to);
  const pick = (event: MouseEvent): void => {
    const touched = rows[Math.floor(event.offsetY / ROW)];
    const reach = timeAt(NEAR) - from;
    const segment = touched ? nearest(touched, timeAt(event.offsetX), reach) : null;
    setPicked(touched && segment ? { row: touched, segment } : null);
  };
  const press = (event: KeyboardEvent): void => {
    if (event.key === "Escape") setPicked(null);
    if (!KEYS.includes(event.key)) return;
    event.preventDefault();
    setPicked(stepped(rows, from, to, picked, event.key));
  };
  return (
    <section class="card timeline" data-theme-seen={theme}>
      <div class="lanes">
        <Names rows={rows} foldable={large(lanes.rows)} open={open} choose={setOpen} share={(one) => busyShare(one, from, to, holes)} />
        <canvas
          ref={canvas}
          role="application"
          tabIndex={0}
          aria-label="Activity of each worker, with the busy share next to its name. Arrow keys move between segments."
          style={{ height: `${rows.length * ROW}px` }}
          onMouseMove={(event) => setHover({ x: event.offsetX, row: Math.floor(event.offsetY / ROW) })}
          onMouseLeave={() => setHover(null)}
          onClick={pick}
          onKeyDown={press}
        />
      </div>
      <p class="axis dim">
        <span>{clock(from)}</span>
        <span>{found.length && row ? `${row.worker}: ${found.map(said).join("; ")}` : unknown ? `${row.worker}: unknown` : at !== null ? clock(at) : ""}</span>
        <span>{clock(to)}</span>
      </p>
      <p class="chosen" role="status">
        {picked ? (
          <>
            <b>{picked.row.lane}</b> of {picked.row.worker}: {said(picked.segment)}, from {clock(picked.segment.start)}
          </>
        ) : (
          <span class="dim">Select a segment by click, touch or arrow keys.</span>
        )}
      </p>
    </section>
  );
}

interface Foldable {
  rows: Row[];
  foldable: Set<string>;
  open: ReadonlySet<string>;
  choose: (open: ReadonlySet<string>) => void;
  share: (row: Row) => number | null;
}

/** Beside each row what it is; a button before the first one of many folds them, and opens them again. */
function Names({ rows, foldable, open, choose, share }: Foldable): JSX.Element {
  const turn = (group: string): void => {
    const next = new Set(open);
    if (!next.delete(group)) next.add(group);
    choose(next);
  };
  return (
    <ul>
      {rows.map((one, i) => (
        <li key={one.worker + one.group} data-lane={one.lane}>
          {foldable.has(one.group) && rows[i - 1]?.group !== one.group && (
            <button class="fold" aria-expanded={!one.of} aria-label={`${one.lane}: show each worker`} onClick={() => turn(one.group)}>
              {one.of ? "▸" : "▾"}
            </button>
          )}
          <b>{one.lane}</b> <small class="dim">{one.worker}</small>
          <span class="share" title="Busy share of the known part of this window">
            {percent(share(one))}
          </span>
        </li>
      ))}
    </ul>
  );
}

function percent(share: number | null): string {
  return share === null ? "?" : `${Math.round(share * 100)}%`;
}

function said(one: Segment): string {
  const level = one.level !== 1 ? `, ${one.level.toFixed(one.level < 1 ? 2 : 1)} at a time` : "";
  return `${one.kind} ${((one.end - one.start) * 1000).toFixed(0)} ms${one.version ? `, weights ${one.version}` : ""}${level}`;
}

function draw(canvas: HTMLCanvasElement, rows: Row[], from: number, to: number, holes: Hole[], picked: Picked | null): void {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = rows.length * ROW;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d")!;
  const css = coloured();
  const colours = new Map<string, string>();
  const colour = (name: string): string => {
    if (!colours.has(name)) colours.set(name, css(name));
    return colours.get(name)!;
  };
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const across = (time: number): number => ((time - from) / (to - from)) * width;
  rows.forEach((row, i) => {
    const top = i * ROW + 3;
    const tall = ROW - 6;
    pen.globalAlpha = 1;
    pen.fillStyle = colour("--line");
    pen.fillRect(0, top + tall, width, 1);
    pen.strokeStyle = colour("--warn");
    for (const one of holes) if (isOf(row, one.worker) && one.to > from && one.from < to) hatch(pen, across(one.from), across(one.to), top, tall);
    const shown = within(row, from, to).sort((a, b) => b.level - a.level); // none hides another
    const most = Math.max(1, ...shown.map((one) => one.level));
    for (const one of shown) {
      const left = across(one.start);
      const wide = Math.max(0.6, across(one.end) - left - 0.4);
      const high = tall * Math.max(LEAST, Math.min(1, one.level / most));
      pen.globalAlpha = IDLE.has(one.kind) && one.kind !== "queue" ? 0.45 : 0.9;
      pen.fillStyle = colour(COLOUR.get(one.kind) ?? "--dim");
      pen.fillRect(left, top + tall - high, wide, high);
      if (!isSame(picked, { row, segment: one })) continue;
      pen.globalAlpha = 1;
      pen.strokeStyle = colour("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(left - 1, top - 1, Math.max(3, wide + 2), tall + 2);
    }
  });
  pen.globalAlpha = 1;
}

/** Oblique lines; they lie still while the window moves over them. */
function hatch(pen: CanvasRenderingContext2D, left: number, right: number, top: number, tall: number): void {
  const end = Math.min(right, pen.canvas.clientWidth);
  pen.save();
  pen.globalAlpha = 0.55;
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.rect(Math.max(0, left), top, Math.max(2, end - Math.max(0, left)), tall);
  pen.clip();
  pen.beginPath();
  for (let x = left - tall - (left < -tall ? Math.ceil((left + tall) / HATCH) * HATCH : 0); x < end; x += HATCH) {
    pen.moveTo(x, top + tall);
    pen.lineTo(x + tall, top);
  }
  pen.stroke();
  pen.restore();
}

/** History first and again after every break and gap, live in between; drawn a few times a second. */
function useLanes(job: JobDetail, follow: Follow): { lanes: Lanes; problem: string } {
  const [lanes] = useState(() => new Lanes());
  const [problem, setProblem] = useState("");
  const [, redraw] = useReducer((n: number) => n + 1, 0);
  const newest = useRef(job);
  newest.current = job;
  useEffect(() => {
    let over = false;
    let cursor = 0;
    const read = async (): Promise<void> => {
      for (let more = true; more && !over; ) {
        const query = cursor ? `after=${cursor}` : `last_s=${lookBack(newest.current, Date.now() / 1000)}`;
        const page = await ask<{ timeline: Part[]; cursor: number; more: boolean }>(path(job.id, `/timeline?limit=2000&${query}`));
        for (const part of page.timeline) lanes.add(part);
        more = page.more && page.cursor > cursor;
        cursor = page.cursor;
      }
    };
    const history = new Refill(lanes, read, (_, said) => setProblem(said));
    let way = follow.way;
    const stops = [
      follow.hear("timeline", (part) => {
        lanes.add(part as Part);
        if (follow.way === "live" && !history.busy && lanes.gaps().length) void history.ask();
      }),
      follow.watch(() => {
        if (follow.way !== way && follow.way !== "joining") void history.ask();
        way = follow.way;
      }),
    ];
    void history.ask();
    let turn = 0;
    const timer = window.setInterval(() => {
      turn += 1;
      if (follow.way === "polling" && turn % 8 === 0) void history.ask();
      lanes.forget(lanes.end);
      redraw(undefined);
    }, DRAW_MS);
    return () => {
      over = true;
      history.close();
      clearInterval(timer);
      for (const stop of stops) stop();
    };
  }, [job.id, follow]);
  return { lanes, problem };
}
