// What a job has saved: to take away, to ask, to go on from.

import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { go, useAsked, useDoing, useMay } from "../../hooks.ts";
import { ask, job as path, onceKey } from "../../lib/api.ts";
import { partOf, policiesOf } from "../../lib/curves/policies.ts";
import { inferenceSpec, savesAdapters } from "../../lib/serve.ts";
import { mainResult } from "../../lib/checkpoints/results.ts";
import type { Checkpoint, Evaluation, Job, JobDetail } from "../../lib/types.ts";
import { bytes, download, moment } from "../../lib/words.ts";
import { Choice, Empty, Said, Table, type Column } from "../../parts.tsx";
import { Evaluations } from "./evaluations.tsx";

export function Checkpoints({ job }: { job: JobDetail }): JSX.Element {
  const policies = policiesOf(job);
  const [policy, setPolicy] = useState(policies[0] ?? "");
  return (
    <>
      {policies.length > 0 && (
        <div class="bar">
          <Choice label="policy" value={policy} of={policies} choose={setPolicy} />
        </div>
      )}
      <Saved key={policy} job={job} policy={policy} />
    </>
  );
}

/** `policy`: whose, of a job with several; empty: the job's. */
function Saved({ job, policy }: { job: JobDetail; policy: string }): JSX.Element {
  const { value, problem } = useAsked<{ checkpoints: Checkpoint[] }>(path(job.id, `/checkpoints${query(policy)}`), 5);
  const evaluations = useAsked<{ evaluations: Evaluation[] }>(path(job.id, "/evaluations"), 5).value?.evaluations ?? [];
  const serves = useMay("jobs:write") && job.kind !== "inference";
  const downloads = useMay("checkpoints:read");
  const doing = useDoing();
  const once = useRef(new Map<number, string>()); // by step: an answer that was lost makes no second job
  if (!value) return problem ? <Said problem={problem} /> : <Empty>Loading…</Empty>;
  const bySteps = <Evaluations job={job} policy={policy} evaluations={evaluations} />;
  if (!value.checkpoints.length)
    return (
      <>
        <Empty>
          No checkpoints yet. <code>train.checkpoint_every</code> says after how many steps one is saved.
        </Empty>
        {bySteps}
      </>
    );
  const chat = (one: Checkpoint): void =>
    doing.act(async () => {
      const headers = { "Idempotency-Key": once.current.get(one.step) ?? onceKey() };
      once.current.set(one.step, headers["Idempotency-Key"]);
      const made = await ask<Job>("/v1/jobs", { method: "POST", body: inferenceSpec(job, one.step, policy), headers });
      go("jobs", made.id, "chat");
    });
  const columns: Column<Checkpoint>[] = [
    ["Step", (one) => one.step],
    ["Created", (one) => moment(one.created)],
    ["Model", (one) => bytes(one.model_bytes)],
    ["With optimizer", (one) => bytes(one.bytes)],
    ["Evaluations", (one) => <Evaluated of={evaluations.filter((found) => found.step === one.step && found.policy === policy)} />],
    [
      "",
      (one) => (
        <>
          {downloads && <button onClick={() => take(job, policy, one)}>Download</button>}
          {serves && (
            <button disabled={doing.doing} onClick={() => chat(one)} title="Submit an inference job for this checkpoint">
              Chat with this
            </button>
          )}
          {serves && !policy && <button onClick={() => go("submit", job.id, String(one.step))}>Continue training</button>}
        </>
      ),
      "actions",
    ],
  ];
  return (
    <>
      <Said problem={doing.problem} />
      <Table of={columns} rows={[...value.checkpoints].reverse()} by={(one) => `${one.epoch}.${one.step}`} look="card" />
      {bySteps}
      {downloads && <OnTheCommandLine job={job} policy={policy} />}
    </>
  );
}

/** What eval jobs say of a checkpoint. */
export function Evaluated({ of }: { of: Evaluation[] }): JSX.Element {
  return (
    <>
      {of.map((one) => (
        <div key={one.job}>
          <a href={`#/jobs/${one.job}${one.during_training ? "/checkpoints" : ""}`}>{mainResult(one.values) ?? one.state}</a>{" "}
          <small class="dim">{[one.setting, one.during_training && "during training"].filter(Boolean).join(", ")}</small>
        </div>
      ))}
    </>
  );
}

/** What `opentinker download` brings, which is what the button does: no optimizer. */
function OnTheCommandLine({ job, policy }: { job: JobDetail; policy: string }): JSX.Element {
  const line = `opentinker download ${job.id} DIR${option(policy)}`;
  return (
    <p class="dim">
      {savesAdapters(job, policy) ? (
        <>
          The newest adapter and its tokenizer, without the base model: <code>{line}</code>; merged into the base:{" "}
          <code>{line} --merge</code>.
        </>
      ) : (
        <>
          The newest model and its tokenizer: <code>{line}</code>.
        </>
      )}{" "}
      Other checkpoints: <code>--step</code>. With optimizer state, in Python:{" "}
      <code>{`opentinker.Client().download("${partOf(job.id, policy)}", "DIR", everything=True)`}</code>
    </p>
  );
}

function query(policy: string): string {
  return policy ? `?policy=${encodeURIComponent(policy)}` : "";
}

/** Of the command line. */
function option(policy: string): string {
  return policy ? ` --policy ${policy}` : "";
}

/** The browser's own download: its cookie says who asks. */
function take(job: JobDetail, policy: string, one: Checkpoint): void {
  const name = `${job.id}${policy && `-${policy}`}-step-${one.step}.tar`;
  download(name, path(job.id, `/checkpoints/${one.step}/download${query(policy)}`));
}
