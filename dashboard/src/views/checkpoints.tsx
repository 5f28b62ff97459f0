// What a job has saved: to take away, to ask, to go on from.

import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { go, useAsked, useDoing, useMay } from "../hooks.ts";
import { ask, fetched, job as path, key, onceKey } from "../lib/api.ts";
import { inferenceSpec, savesAdapters } from "../lib/serve.ts";
import type { Checkpoint, Job, JobDetail } from "../lib/types.ts";
import { bytes, moment, save } from "../lib/words.ts";
import { Empty, Said } from "../parts.tsx";

const LARGE = 512 * 1024 * 1024;

export function Checkpoints({ job }: { job: JobDetail }): JSX.Element {
  const { value, problem } = useAsked<{ checkpoints: Checkpoint[] }>(path(job.id, "/checkpoints"), 5);
  const serves = useMay("jobs:write") && job.kind !== "inference";
  const downloads = useMay("checkpoints:read");
  const doing = useDoing();
  const [busy, setBusy] = useState("");
  const once = useRef(new Map<number, string>()); // by step: an answer that was lost makes no second job
  if (!value) return problem ? <Said problem={problem} /> : <Empty>…</Empty>;
  if (!value.checkpoints.length) return <Empty>None yet: train.checkpoint_every says how often one is made.</Empty>;
  const take = (one: Checkpoint): void =>
    doing.act(async () => {
      try {
        await download(job, one, (share) => setBusy(`step ${one.step}: ${share}`));
      } finally {
        setBusy("");
      }
    });
  const chat = (one: Checkpoint): void =>
    doing.act(async () => {
      const headers = { "Idempotency-Key": once.current.get(one.step) ?? onceKey() };
      once.current.set(one.step, headers["Idempotency-Key"]);
      const made = await ask<Job>("/v1/jobs", { method: "POST", body: inferenceSpec(job, one.step), headers });
      go("jobs", made.id, "chat");
    });
  return (
    <>
      <Said problem={doing.problem} />
      {busy && <p role="status">{busy}</p>}
      <table class="card">
        <thead>
          <tr>
            <th>Step</th>
            <th>Made</th>
            <th>Model</th>
            <th>With optimizer</th>
            <th />
          </tr>
        </thead>
        <tbody>
          {[...value.checkpoints].reverse().map((one) => (
            <tr key={`${one.epoch}.${one.step}`}>
              <td data-label="Step">{one.step}</td>
              <td data-label="Made">{moment(one.created)}</td>
              <td data-label="Model">{bytes(one.model_bytes)}</td>
              <td data-label="With optimizer">{bytes(one.bytes)}</td>
              <td class="actions">
                {downloads && tooLarge(one) && (
                  <small>
                    <code>{`opentinker download ${job.id} DIR --step ${one.step}`}</code>, for this browser would hold all of it in memory
                  </small>
                )}
                {downloads && !tooLarge(one) && (
                  <button disabled={doing.doing} onClick={() => take(one)}>
                    Download
                  </button>
                )}
                {serves && (
                  <button disabled={doing.doing} onClick={() => chat(one)} title="Submits an inference job that serves it">
                    Chat with this
                  </button>
                )}
                {serves && <button onClick={() => go("submit", job.id, String(one.step))}>Continue training</button>}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {downloads && <OnTheCommandLine job={job} />}
    </>
  );
}

/** What `opentinker download` brings, which is what the button does: no optimizer. */
function OnTheCommandLine({ job }: { job: JobDetail }): JSX.Element {
  const line = `opentinker download ${job.id} DIR`;
  return (
    <p class="dim">
      {savesAdapters(job) ? (
        <>
          The newest adapter and its tokenizer, without the base model: <code>{line}</code>; put into the base, as a model of its own:{" "}
          <code>{line} --merge</code>.
        </>
      ) : (
        <>
          The newest model and its tokenizer: <code>{line}</code>.
        </>
      )}{" "}
      Another one: <code>--step</code>. With the optimizer's state, in Python:{" "}
      <code>{`opentinker.Client().download("${job.id}", "DIR", everything=True)`}</code>
    </p>
  );
}

type Picker = (options: { suggestedName: string }) => Promise<{ createWritable: () => Promise<WritableStream<Uint8Array>> }>;

function picker(): Picker | undefined {
  return (window as unknown as { showSaveFilePicker?: Picker }).showSaveFilePicker;
}

/** For a browser that cannot write to a file what comes. Without a key it loads it by itself, whatever the size. */
function tooLarge(one: Checkpoint): boolean {
  return key() !== "" && one.model_bytes > LARGE && !picker();
}

/** What is large to a file as it comes, else through memory. Without a key the browser does it alone. */
async function download(job: JobDetail, one: Checkpoint, tell: (share: string) => void): Promise<void> {
  const from = path(job.id, `/checkpoints/${one.step}/download`);
  const name = `${job.id}-step-${one.step}.tar`;
  if (!key()) {
    const link = document.createElement("a");
    link.href = from;
    link.download = name;
    link.click();
    return;
  }
  const pick = picker();
  if (pick && one.model_bytes > LARGE) {
    const file = await (await pick({ suggestedName: name })).createWritable();
    const response = await fetched(from);
    await response.body!.pipeThrough(counted(one.model_bytes, tell)).pipeTo(file);
    return;
  }
  const response = await fetched(from);
  save(name, await new Response(response.body!.pipeThrough(counted(one.model_bytes, tell))).blob());
}

function counted(whole: number, tell: (share: string) => void): TransformStream<Uint8Array, Uint8Array> {
  let count = 0;
  return new TransformStream({
    transform(chunk, controller) {
      count += chunk.byteLength;
      tell(`${bytes(count)} of ${bytes(whole)}`);
      controller.enqueue(chunk);
    },
  });
}
