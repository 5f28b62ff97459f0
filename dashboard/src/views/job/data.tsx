// The rows of a job's data set: how often each was played and solved; a row opens to its prompt as the policy gets it.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked, useMay, useSettled } from "../../hooks.ts";
import { job as path } from "../../lib/api.ts";
import { PAGE, percent, queryOf, shareLine, SHARES, summary, type DataRow, type DataRows } from "../../lib/data.ts";
import { policiesOf } from "../../lib/curves/policies.ts";
import { FINAL, type JobDetail } from "../../lib/types.ts";
import { short } from "../../lib/words.ts";
import { Choice, Empty, Facts, Head, Said, Search, Select } from "../../parts.tsx";

const SORTS: [string, string][] = [
  ["row", "in their order"],
  ["solved", "least solved first"],
  ["-solved", "most solved first"],
  ["-played", "most played first"],
  ["-reward", "highest reward first"],
  ["reward", "lowest reward first"],
];
const SETTLED_MS = 300;
/** The server renders the page again each time. */
const LOOK_S = 30;
const CURVE = { width: 90, height: 20 };
const LARGE = { width: 480, height: 60 };
/** Steps that are linked. */
const LINKED = 10;

export function Data({ job }: { job: JobDetail }): JSX.Element {
  const policies = policiesOf(job);
  const [policy, setPolicy] = useState(policies[0] ?? "");
  const [text, setText] = useState("");
  const [share, setShare] = useState(Object.keys(SHARES)[0]!);
  const [sort, setSort] = useState("row");
  const [page, setPage] = useState(0);
  const search = useSettled(text.trim(), SETTLED_MS);
  const query = queryOf({ text: search, share, sort, page, policy });
  const plays = ["rl", "eval"].includes(job.kind);
  const { value, problem } = useAsked<DataRows>(path(job.id, `/rows${query}`), FINAL.includes(job.state) ? 0 : LOOK_S);
  const last = value ? Math.max(0, Math.ceil(value.total / PAGE) - 1) : 0;
  const first = <T,>(set: (value: T) => void): ((value: T) => void) => (value) => (set(value), setPage(0));
  return (
    <>
      <div class="bar">
        <Search label="Search rows" placeholder="Text in the prompt" value={text} set={first(setText)} />
        {plays && <Select label="Solved share" value={share} of={Object.keys(SHARES).map((one) => [one, one])} choose={first(setShare)} />}
        {plays && <Select label="Order" value={sort} of={SORTS} choose={first(setSort)} />}
        {policies.length > 0 && <Choice label="policy" value={policy} of={policies} choose={first(setPolicy)} />}
        <button aria-label="Earlier rows" disabled={page <= 0} onClick={() => setPage(page - 1)}>
          ‹
        </button>
        <button aria-label="Later rows" disabled={page >= last} onClick={() => setPage(page + 1)}>
          ›
        </button>
        {value && (
          <small class="dim" role="status">
            {summary(value)}
          </small>
        )}
      </div>
      <Said problem={problem} />
      {!value && !problem && <Empty>Loading…</Empty>}
      {value && !value.rows.length && <Empty>No row matches the filters. Search for other words, or choose any share.</Empty>}
      {value && value.rows.length > 0 && <Table key={query} job={job} rows={value.rows} plays={plays} />}
    </>
  );
}

function Table({ job, rows, plays }: { job: JobDetail; rows: DataRow[]; plays: boolean }): JSX.Element {
  const [open, setOpen] = useState<number | null>(null);
  const columns = ["Row", "Tokens", ...(plays ? ["Played", "Reward", "Solved", "Over steps"] : []), "Prompt"];
  return (
    <table class="card data">
      <Head of={columns} />
      <tbody>
        {rows.map((one) => (
          <Row key={one.row} job={job} row={one} plays={plays} columns={columns.length} isOpen={open === one.row} turn={() => setOpen(open === one.row ? null : one.row)} />
        ))}
      </tbody>
    </table>
  );
}

interface RowProps {
  job: JobDetail;
  row: DataRow;
  plays: boolean;
  columns: number;
  isOpen: boolean;
  turn: () => void;
}

function Row({ job, row, plays, columns, isOpen, turn }: RowProps): JSX.Element {
  const opens = (event: MouseEvent): void => {
    if (!(event.target instanceof HTMLElement && event.target.closest("a, button"))) turn();
  };
  return (
    <>
      <tr data-row={row.row} onClick={opens}>
        <td data-label="Row">
          <button class="link" aria-expanded={isOpen} aria-label={`Prompt of row ${row.row}`} onClick={turn}>
            {row.row}
          </button>
        </td>
        <td data-label="Tokens">{row.tokens ?? "–"}</td>
        {plays && (
          <>
            <td data-label="Played">{row.played}</td>
            <td data-label="Reward">{row.reward === null ? "–" : short(row.reward)}</td>
            <td data-label="Solved">{percent(row.solved)}</td>
            <td data-label="Over steps">
              <Curve row={row} {...CURVE} />
            </td>
          </>
        )}
        <td data-label="Prompt" class="begins">
          {row.prompt ? row.prompt.slice(0, 300) : row.problem}
        </td>
      </tr>
      {isOpen && (
        <tr class="opened">
          <td colSpan={columns}>
            <Opened job={job} row={row} plays={plays} />
          </td>
        </tr>
      )}
    </>
  );
}

function Curve({ row, width, height }: { row: DataRow; width: number; height: number }): JSX.Element {
  if (!row.series.length) return <></>;
  const [from, to] = [row.series[0]!, row.series.at(-1)!];
  const label = `solved share from ${percent(from.solved)} to ${percent(to.solved)}, up to step ${to.step}`;
  return (
    <svg class="curve" width={width} height={height} viewBox={`0 -1 ${width} ${height}`} role="img" aria-label={label}>
      <polyline points={shareLine(row.series, width, height - 2)} />
    </svg>
  );
}

function Opened({ job, row, plays }: { job: JobDetail; row: DataRow; plays: boolean }): JSX.Element {
  const images = row.images ? ` and ${row.images} ${row.images === 1 ? "image" : "images"}` : "";
  const kept = row.kept.slice(-LINKED);
  const may = useMay("jobs:write");
  return (
    <>
      <Facts
        of={[
          ["Row", row.row],
          row.place && ["Place", row.place],
          ["Prompt", row.tokens === null ? "tokens unknown" : `${row.tokens} tokens${images}`],
          plays && ["Played", `${row.played} times`],
          plays && ["Solved", percent(row.solved)],
          kept.length && [
            "Episodes",
            <span key="kept" class="steps">
              {kept.map((step) => (
                <a key={step} href={`#/jobs/${job.id}/episodes/${step}`}>
                  step {step}
                </a>
              ))}
            </span>,
          ],
        ]}
      />
      {plays && <Curve row={row} {...LARGE} />}
      {plays && may && (
        <p>
          <a href={`#/play/${job.id}/${row.row}`}>Play it yourself</a>
        </p>
      )}
      {row.problem && <p class="problem">{row.problem}</p>}
      {row.prompt && (
        <p class="message">
          <span class="words">{row.prompt}</span>
          {row.left_out > 0 && <small class="dim"> … {row.left_out.toLocaleString("en")} more characters</small>}
        </p>
      )}
      {Object.entries(row.answers).map(([name, words]) => (
        <p key={name} class="message assistant">
          <small>{name}</small>
          <span class="words">{words}</span>
        </p>
      ))}
    </>
  );
}
