// A job's settings: all of them as they were resolved, or what differs from the defaults.

import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { useAsked } from "../../hooks.ts";
import { settings, type Schema, type Setting } from "../../lib/spec.ts";
import type { Json, JobDetail } from "../../lib/types.ts";
import { save } from "../../lib/words.ts";
import { Empty, Said, Table, type Column } from "../../parts.tsx";

/** Name of a job's spec in the server's OpenAPI document. */
const ROOT = "SubmittedSpec";

const COLUMNS: Column<Setting>[] = [
  [
    "Setting",
    ({ path, meaning }) =>
      meaning ? (
        <details>
          <summary>
            <code>{path}</code>
          </summary>
          <small class="dim">{meaning}</small>
        </details>
      ) : (
        <code>{path}</code>
      ),
  ],
  ["Value", (one) => <code>{written(one.value)}</code>],
  ["Default", ({ usual }) => (usual === undefined ? "–" : <code>{written(usual)}</code>), "dim"],
];

export function Config({ job }: { job: JobDetail }): JSX.Element {
  const { value, problem } = useAsked<{ components: { schemas: Record<string, Schema> } }>("/openapi.json");
  const [all, setAll] = useState(false);
  const found = useMemo(() => (value ? settings(job.spec, value.components.schemas, ROOT) : []), [value, job.id]);
  const shown = all ? found : found.filter((one) => one.differs);
  const text = JSON.stringify(job.spec, null, 2);
  return (
    <>
      <Said problem={problem} />
      <div class="bar">
        <label class="check">
          <input type="checkbox" checked={all} onChange={(event) => setAll(event.currentTarget.checked)} /> all settings
        </label>
        <small class="dim">
          {found.filter((one) => one.differs).length} of {found.length} differ from their defaults
        </small>
        <span class="spring" />
        <button onClick={() => save(`${job.name}.json`, new Blob([text], { type: "application/json" }))}>Save as JSON</button>
      </div>
      {!value && !problem && <Empty>Loading…</Empty>}
      <Table of={COLUMNS} rows={shown} by={(one) => one.path} look="card config" row={(one) => ({ class: one.differs ? "differs" : "" })} />
    </>
  );
}

function written(value: Json): string {
  return typeof value === "string" ? value || '""' : JSON.stringify(value);
}
