// A spec, looked at by the server before it is a job.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { parse } from "smol-toml";
import { go, useAsked, useDoing } from "../hooks.ts";
import { ask, job as path, onceKey, Problem } from "../lib/api.ts";
import { cloneSpec } from "../lib/serve.ts";
import type { Job, JobDetail, Json } from "../lib/types.ts";
import { Said } from "../parts.tsx";

interface Report {
  valid: boolean;
  mistakes: { field: string; problem: string; value: Json }[];
  checks: { what: string; found: string; result: string; hint: string }[];
  messages: { role: string; content: string }[];
}

const EXAMPLE = `name = "copy-digits"
model = { base = "runs/models/tiny", chat_template = "plain" }
environment = { name = "copy_digits" }
algorithm = { group_size = 16, groups_per_batch = 8, max_staleness = 1 }
rollout = { max_tokens = 4 }
train = { steps = 200, lr = 3e-4, warmup_steps = 10 }
`;

export function Submit({ from, step }: { from: string; step: string }): JSX.Element {
  const source = useAsked<JobDetail>(from ? path(from) : null);
  const [text, setText] = useState(from ? "" : EXAMPLE);
  const [report, setReport] = useState<Report | null>(null);
  const { doing, problem, act } = useDoing();
  const once = useRef(""); // one key per text: an answer that was lost makes no second job
  const change = (given: string): void => {
    once.current = "";
    setText(given);
    setReport(null);
  };
  useEffect(() => {
    if (source.value) change(JSON.stringify(cloneSpec(source.value, step), null, 2));
  }, [source.value?.id]);
  const validate = (): void =>
    act(async () => setReport(await ask<Report>("/v1/validate", { method: "POST", body: spec(text) })));
  const submit = (): void =>
    act(async () => {
      const headers = { "Idempotency-Key": (once.current ||= onceKey()) };
      const made = await ask<Job>("/v1/jobs", { method: "POST", body: spec(text), headers });
      go("jobs", made.id);
    });
  return (
    <section class="card submit">
      <h1>{from ? (step ? `Continue from ${from}, step ${step}` : `Clone ${from}`) : "Submit a job"}</h1>
      <Said problem={source.problem ?? problem} />
      <div class="bar">
        <label class="file">
          Open a file…
          <input
            type="file"
            accept=".toml,.json"
            onChange={(event) => void event.currentTarget.files?.[0]?.text().then(change)}
          />
        </label>
        <small class="dim">TOML or JSON, with paths on the server. Settings: docs/job-spec.md.</small>
      </div>
      <textarea aria-label="Spec" spellcheck={false} rows={24} value={text} onInput={(event) => change(event.currentTarget.value)} />
      <div class="bar">
        <button disabled={doing} onClick={validate}>
          Validate
        </button>
        <button class="main" disabled={doing} onClick={submit}>
          Submit
        </button>
        {doing && <small class="dim">checking…</small>}
      </div>
      {report && <Checked report={report} />}
    </section>
  );
}

function Checked({ report }: { report: Report }): JSX.Element {
  return (
    <div role="status">
      <p class={report.valid ? "good" : "problem"}>{report.valid ? "The job can run." : "The job cannot run."}</p>
      <ul>
        {report.mistakes.map((one) => (
          <li key={one.field + one.problem}>
            <code>{one.field}</code> {one.problem}
          </li>
        ))}
        {report.checks.map((one) => (
          <li key={one.what + one.found} class={one.result}>
            <b>{one.result}</b> {one.what}: {one.found} {one.hint && <span class="dim">({one.hint})</span>}
          </li>
        ))}
      </ul>
    </div>
  );
}

function spec(text: string): Json {
  try {
    return (text.trimStart().startsWith("{") ? JSON.parse(text) : JSON.parse(JSON.stringify(parse(text)))) as Json;
  } catch (error) {
    throw new Problem(0, `neither valid TOML nor JSON: ${error instanceof Error ? error.message : String(error)}`);
  }
}
