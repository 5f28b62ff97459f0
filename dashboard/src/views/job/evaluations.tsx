// How a job's weights were evaluated, step by step: on its own schedule and by eval jobs.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked } from "../../hooks.ts";
import { job as path } from "../../lib/api.ts";
import { evaluationTable, type Columns, type EvaluatedStep } from "../../lib/checkpoints/evaluations.ts";
import type { Evaluation, JobDetail, Point } from "../../lib/types.ts";
import { Bounded, Choice, Table, type Column } from "../../parts.tsx";

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
  const columns: Column<EvaluatedStep>[] = [
    ["Step", (row) => row.step],
    ["By", (row) => (row.job ? <a href={`#/jobs/${row.job}`}>{row.setting}</a> : "schedule")],
    ...table.columns.map((name, at): Column<EvaluatedStep> => [name, ({ cells }) => <Bounded of={cells[at]} />]),
  ];
  return (
    <section class="card evaluations" aria-label="Evaluations by step">
      <div class="bar">
        <h2>Evaluations by step</h2>
        {table.hasCategories && <Choice<Columns> quiet label="Columns" value={shown} of={["metrics", "categories"]} choose={setShown} />}
        {shown === "categories" && <small class="dim">share of episodes solved</small>}
      </div>
      <div class="scrolls" tabIndex={0} role="group" aria-label="Table of evaluations">
        <Table of={columns} rows={table.rows} by={(row) => `${row.step}/${row.job}`} />
      </div>
    </section>
  );
}
