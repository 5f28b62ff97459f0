// All jobs: what they are, how far, and what they wait for; some of them chosen, to be compared, cancelled, tagged or deleted.

import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { go, queryNow, useAfter, useKeyNames, useNow, useQuery, useTypingWait } from "../../hooks.ts";
import { columnsOf, deedOf, isTyping, knownTo, picked, windowed, type Span } from "../../lib/jobs/rows.ts";
import {
  sortDirectionOf, filterOf, groupings, queryOf, SORT_OF, sortedBy, sortsFor, valueOf, viewOf, withLabel, without,
  type Label, type ListView, type Property,
} from "../../lib/jobs/view.ts"; // prettier-ignore
import { type Job } from "../../lib/types.ts";
import { counted } from "../../lib/words.ts";
import { Empty, Said, Search, Select } from "../../parts.tsx";
import { Away } from "./away.tsx";
import { Chip, Filters } from "./filters.tsx";
import { Bulk, pressed as pressedFor, type Rest } from "./job-actions.tsx";
import { Groups } from "./groups.tsx";
import { COLUMNS, JobRow, ROW_PX } from "./job-row.tsx";
import { useListed } from "./use-listed.ts";

const STATES = ["", "running", "queued", "starting", "paused", "succeeded", "failed", "cancelled"];
const LOOK_S = 2;
/** A filter or an order is more work for the server. */
const SLOW_S = 5;
/** How near the end of a list is when more is asked for. */
const NEAR = "1200px";
const KEPT_COLUMNS = "opentinker-columns";
const HELP = "j and k move, Enter opens, x selects, a selects all; of the selected jobs c compares, t tags, s cancels, d deletes artifacts, Escape clears the selection; / searches; g and then j, w, m, e, c or s goes to Jobs, Sweeps, Models, Environments, Cluster or Submit";

export function Jobs(): JSX.Element {
  const [query, setQuery] = useQuery();
  const view = viewOf(query);
  const { labels, by, sort } = view;
  const change = (part: Partial<ListView>): void => setQuery(queryOf({ ...viewOf(queryNow()), ...part }));
  const [columns, setColumns] = useState(() => columnsOf(localStorage.getItem(KEPT_COLUMNS), COLUMNS, window.innerWidth));
  const filter = filterOf(view);
  const asked = new URLSearchParams([["sort", sort], ...filter]);
  const choose = (label: Label): void => change({ by: "", labels: withLabel(labels, label) });
  const filtered = (label: Label): void => change({ labels: withLabel(labels, label) });
  const state = valueOf(labels, "state");
  const seen = useRef(new Map<string, Job>()); // what is known here shows at once, until the server has answered
  const waitMs = useTypingWait(`${filter}`);
  const isFiltered = `${filter}` !== "";
  const clear = (): void => change({ search: "", labels: [] });
  return (
    <>
      <h1 class="unseen">Jobs</h1>
      <Away />
      <div class="bar">
        <Search id="search-jobs" label="Search jobs" placeholder="Name, id, kind, environment, model, key's id…" value={view.search} set={(search) => change({ search })} />
        <Select label="State" value={state} of={STATES.map((one) => [one, one || "any state"])} choose={(one) => filtered(["state", one])} />
        <Filters of="jobs" labels={labels} choose={filtered} />
        <Select label="Order" value={sort} of={sortsFor(sort)} choose={(one) => change({ sort: one })} />
        <Select
          label="Group by"
          value={by}
          of={groupings}
          choose={(one) => change({ by: one as Property | "" })}
        />
        <a href="#/sweeps">Sweeps</a>
        <Columns
          shown={columns}
          choose={(names) => {
            localStorage.setItem(KEPT_COLUMNS, names.join());
            setColumns(names);
          }}
        />
        {labels.map((label) => label[0] !== "state" && <Chip key={label.join()} label={label} remove={() => change({ labels: without(labels, label) })} />)}
      </div>
      {by ? (
        <Groups key={`${by}${filter}`} of="jobs" by={by} filter={`&${filter}`} waitMs={waitMs} choose={choose} />
      ) : (
        <Found
          key={`${asked}`}
          filter={`&${asked}`}
          clear={isFiltered ? clear : null}
          rows={{ columns, sort, choose, order: (one) => change({ sort: sortedBy(sort, one) }) }}
          waitMs={waitMs}
          seen={seen.current}
          known={() => knownTo(view, seen.current.values())}
        />
      )}
    </>
  );
}

function Columns({ shown, choose }: { shown: string[]; choose: (names: string[]) => void }): JSX.Element {
  const toggled = (name: string): string[] => COLUMNS.filter((one) => (one === name ? !shown.includes(one) : shown.includes(one)));
  return (
    <details class="columns">
      <summary>Columns</summary>
      <div class="card">
        {COLUMNS.map((name) => (
          <label key={name} class="check">
            <input type="checkbox" aria-label={`Column ${name}`} checked={shown.includes(name)} onChange={() => choose(toggled(name))} /> {name}
          </label>
        ))}
      </div>
    </details>
  );
}

/** How rows are shown, and what a click in the table does to the list. */
interface RowsProps {
  columns: string[];
  sort: string;
  choose: (label: Label) => void;
  /** Sorts by a column. */
  order: (column: string) => void;
}

interface FoundProps {
  filter: string;
  /** Shows all jobs; null: it does. */
  clear: (() => void) | null;
  rows: RowsProps;
  waitMs: number;
  /** All jobs that were listed so far, by id. */
  seen: Map<string, Job>;
  /** Those among them that match. */
  known: () => Job[];
}

function Found({ filter, clear, rows, waitMs, seen, known }: FoundProps): JSX.Element {
  const isFiltered = clear !== null;
  const may = useAfter(waitMs);
  const { listed, problem, isReading, next, rest, again } = useListed(may ? filter : null, filter.startsWith("&sort=created") && !isFiltered ? LOOK_S : SLOW_S);
  if (!listed) {
    const jobs = problem ? [] : known();
    if (problem) return <Said problem={problem} />;
    return jobs.length ? <Table jobs={jobs} seen={seen} unloaded={null} {...rows} again={again} /> : <Empty>Loading…</Empty>;
  }
  const { jobs, more } = listed;
  for (const job of jobs) seen.set(job.id, job);
  return (
    <>
      <Said problem={problem} />
      {jobs.length === 0 ? <Nothing clear={clear} more={more} /> : <Table jobs={jobs} seen={seen} unloaded={more ? { filter, isReading, rest } : null} {...rows} again={again} />}
      <p class="dim count">
        {more ? `the first ${counted(jobs.length, "job")}` : counted(jobs.length, "job")} <span title={HELP}>keys: ?</span>
      </p>
      {more && !isReading && !problem && <More key={listed.cursor} isSearch={isFiltered} byItself={jobs.length > 0} next={next} />}
    </>
  );
}

function Nothing({ clear, more }: { clear: (() => void) | null; more: boolean }): JSX.Element {
  if (!clear) {
    return (
      <Empty>
        No jobs yet. <a href="#/submit">Submit one here</a>, or type <code>opentinker submit examples/copy_digits.toml</code>.
      </Empty>
    );
  }
  return (
    <Empty>
      {more ? "None of the newest jobs matches; search the older ones below, or" : "No job matches the filters."} <button onClick={clear}>{more ? "clear the filters" : "Clear the filters"}</button>
    </Empty>
  );
}

/** Asks for more: by a click, or as soon as the end of the list comes near. */
function More({ isSearch, byItself, next }: { isSearch: boolean; byItself: boolean; next: () => void }): JSX.Element {
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    if (!byItself || !button.current) return;
    const watcher = new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && button.current?.click(), { rootMargin: NEAR });
    watcher.observe(button.current);
    return () => watcher.disconnect();
  }, [byItself]);
  return (
    <button ref={button} class="more" onClick={next}>
      {isSearch ? "Search older jobs" : "More jobs"}
    </button>
  );
}

interface TableProps extends RowsProps {
  jobs: Job[];
  /** Of a selected job that is not listed any more what was known last. */
  seen: Map<string, Job>;
  /** Null: these are all. */
  unloaded: Rest | null;
  again: () => void;
}

function Table({ jobs, seen, unloaded, columns, sort, choose, order, again }: TableProps): JSX.Element {
  const body = useRef<HTMLTableSectionElement>(null);
  const span = useWindow(body, jobs.length);
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set());
  const [isWhole, setWhole] = useState(false); // all jobs are chosen as soon as they are loaded
  const [last, setLast] = useState<string | null>(null);
  const [atId, setAt] = useState<string | null>(null);
  const [help, setHelp] = useState(false);
  const keyName = useKeyNames();
  const now = useNow(5);
  const ids = jobs.map((job) => job.id);
  const at = atId === null ? -1 : ids.indexOf(atId);
  const listed = new Set(ids);
  const gone = [...chosen].filter((id) => !listed.has(id)).flatMap((id) => seen.get(id) ?? []);
  const picks = [...jobs.filter((job) => chosen.has(job.id)), ...gone];
  const isAll = picks.length - gone.length === jobs.length;
  const pick = (id: string, shift: boolean): void => {
    setWhole(false);
    setChosen(picked(chosen, ids, id, last, shift));
    setLast(id);
  };
  const chooseOnly = (some: string[]): void => {
    setWhole(false);
    setChosen(new Set(some));
  };
  const chooseWhole = (): void => {
    setWhole(true);
    unloaded?.rest();
  };
  useEffect(() => {
    if (!isWhole || unloaded?.isReading) return;
    if (unloaded) setWhole(false);
    else chooseOnly(ids);
  }, [isWhole, unloaded]);
  const deeds = useRef({ pick, choose });
  deeds.current = { pick, choose }; // rows that have not changed are not drawn again, and ask for the newest
  const compare = (): void => {
    if (picks.length) go("compare", picks.map((job) => job.id).join());
  };
  const move = (to: number): void => {
    const next = Math.max(0, Math.min(jobs.length - 1, to));
    setAt(ids[next] ?? null);
    const top = (body.current?.getBoundingClientRect().top ?? 0) + next * ROW_PX;
    if (top < 80) window.scrollBy(0, top - 80);
    else if (top + ROW_PX > window.innerHeight) window.scrollBy(0, top + ROW_PX - window.innerHeight + 8);
  };
  useLayoutEffect(() => {
    const { style } = document.documentElement;
    style.overflowAnchor = "none"; // else the browser keeps the end of the list in view, and each page that comes asks for the next
    return () => {
      style.overflowAnchor = "";
    };
  }, []);
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent): void => {
      const within = (what: string): boolean => event.target instanceof HTMLElement && event.target.closest(what) !== null;
      if (event.key === "Escape" && isTyping(event.target)) (event.target as HTMLElement).blur();
      const typing = isTyping(event.target) || (event.key === "Enter" && within("button, a, summary"));
      const deed = deedOf(event.key, typing, event.ctrlKey || event.metaKey || event.altKey);
      if (deed === undefined) return;
      const job = jobs[at];
      if (deed === "down") move(at + 1);
      else if (deed === "up") move(at - 1);
      else if (deed === "open" && job) go("jobs", job.id);
      else if (deed === "pick" && job) pick(job.id, event.shiftKey);
      else if (deed === "all") chooseOnly(ids);
      else if (deed === "clear") chooseOnly([]);
      else if (deed === "compare") compare();
      else if (deed === "tag" || deed === "cancel" || deed === "delete") pressedFor(deed);
      else if (deed === "help") setHelp(!help);
      else if (deed === "search") document.getElementById("search-jobs")?.focus();
      else return;
      event.preventDefault();
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  });
  return (
    <>
      {help && <p class="dim">{HELP}.</p>}
      {picks.length > 0 && (
        <Bulk
          jobs={picks}
          unloaded={isAll || isWhole ? unloaded : null}
          whole={chooseWhole}
          compare={compare}
          clear={(but = []) => chooseOnly(but)}
          again={again}
        />
      )}
      <table class="card jobs">
        <thead>
          <tr>
            <th>
              <input
                type="checkbox"
                aria-label="Select all"
                checked={isAll}
                onChange={() => chooseOnly(isAll ? [] : ids)}
              />
            </th>
            {["Job", ...columns].map((name) => (
              <Heading key={name} name={name} sort={sort} order={order} />
            ))}
          </tr>
        </thead>
        <tbody ref={body}>
          <Space px={span.from * ROW_PX} />
          {jobs.slice(span.from, span.to).map((job, place) => (
            <JobRow
              key={job.id}
              job={job}
              now={now}
              owner={keyName(job.key)}
              columns={columns}
              isChosen={chosen.has(job.id)}
              isAt={span.from + place === at}
              deeds={deeds}
            />
          ))}
          <Space px={(jobs.length - span.to) * ROW_PX} />
        </tbody>
      </table>
    </>
  );
}

/** The head of a column; a click sorts by it, and a second one the other way around. */
function Heading({ name, sort, order }: { name: string; sort: string; order: (column: string) => void }): JSX.Element {
  const direction = sortDirectionOf(sort, name);
  if (!SORT_OF[name]) return <th>{name}</th>;
  return (
    <th aria-sort={direction}>
      <button class="heading" onClick={() => order(name)}>
        {name}
        {direction ? (direction === "ascending" ? " ↑" : " ↓") : ""}
      </button>
    </th>
  );
}

/** Stands for rows that are not drawn. */
function Space({ px }: { px: number }): JSX.Element | null {
  const cell = useRef<HTMLTableCellElement>(null);
  useLayoutEffect(() => {
    if (cell.current) cell.current.style.height = `${px}px`;
  }, [px]);
  return px > 0 ? (
    <tr class="space" aria-hidden="true">
      <td ref={cell} />
    </tr>
  ) : null;
}

/** The rows in sight; on a phone, where rows are cards of any height, all. */
function useWindow(body: { current: HTMLTableSectionElement | null }, count: number): Span {
  const [span, set] = useState<Span>({ from: 0, to: Math.min(count, 60) });
  useEffect(() => {
    const look = (): void => {
      const top = -(body.current?.getBoundingClientRect().top ?? 0);
      const next = window.innerWidth <= 720 ? { from: 0, to: count } : windowed(count, ROW_PX, top, window.innerHeight);
      set((before) => (before.from === next.from && before.to === next.to ? before : next));
    };
    look();
    window.addEventListener("scroll", look, { passive: true });
    window.addEventListener("resize", look);
    return () => {
      window.removeEventListener("scroll", look);
      window.removeEventListener("resize", look);
    };
  }, [count]);
  return { from: Math.min(span.from, count), to: Math.min(Math.max(span.to, span.from), count) };
}
