// How a job's weights were evaluated, step by step: on its own schedule and by eval jobs.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked } from "../hooks.ts";
import { job as path } from "../lib/api.ts";
import { evaluationTable, type Columns } from "../lib/evaluations.ts";
import type { Evaluation, JobDetail, Point } from "../lib/types.ts";
import { short } from "../lib/words.ts";
import { Choice, Head } from "../parts.tsx";

const MOST = 10_000;

interface EvaluationsProps {
  job: JobDetail;
  /** Of a job with several policies; empty: the job's. */
  policy: string;
  evaluations: Evaluation[];
}

export function Evaluations({ job, policy, evaluations }: EvaluationsProps): JSX.Element | null {
  const [shown, setShown] = useState<Columns>("metrics");
  const source = policy ? `validation~${policy}` : "validation";
  const { value } = useAsked<{ metrics: Point[] }>(path(job.id, `/metrics?source=${encodeURIComponent(source)}&limit=${MOST}`), 20);
  const table = evaluationTable(evaluations, value?.metrics ?? [], policy, shown);
  if (!table.rows.length) return null;
  return (
    <section class="card evaluations" aria-label="Evaluations by step">
      <div class="bar">
        <h2>Evaluations by step</h2>
        {table.hasCategories && <Choice<Columns> quiet label="Columns" value={shown} of={["metrics", "categories"]} choose={setShown} />}
        {shown === "categories" && <small class="dim">share of episodes solved</small>}
      </div>
      <div class="scrolls" tabIndex={0} role="group" aria-label="Table of evaluations">
        <table>
          <Head of={["Step", "By", ...table.columns]} />
          <tbody>
            {table.rows.map((row) => (
              <tr key={`${row.step}/${row.job}`}>
                <td data-label="Step">{row.step}</td>
                <td data-label="By">{row.job ? <a href={`#/jobs/${row.job}`}>{row.environment}</a> : "schedule"}</td>
                {row.cells.map((cell, i) => (
                  <td key={table.columns[i]} data-label={table.columns[i]}>
                    {cell && <b>{short(cell.value)}</b>} {cell?.interval && <small class="dim">{cell.interval.map(short).join(" to ")}</small>}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
