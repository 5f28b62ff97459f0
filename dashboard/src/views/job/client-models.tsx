// The models that clients train on a Tinker server, what they wait for, and what they saved; how to connect a client.

import type { JSX } from "preact";
import { useAsked, useNow } from "../../hooks.ts";
import { job as path } from "../../lib/api.ts";
import { sparkline } from "../../lib/jobs/rows.ts";
import { connection, queueTime, shortModel, summary, waits, type ModelCheckpoint, type ServedModel, type ServedModels } from "../../lib/tinker.ts";
import { FINAL, type JobDetail } from "../../lib/types.ts";
import { ago, bytes, moment, short } from "../../lib/words.ts";
import { Empty, Said, Table, type Column } from "../../parts.tsx";

const LOOK_S = 2;
const LIMIT = 200;
const CURVE = { width: 90, height: 20 };
/** By kind of checkpoint. */
const USES: Record<string, string> = { weights: "training", sampler_weights: "sampling", external_weights: "download" };

export function ClientModels({ job }: { job: JobDetail }): JSX.Element {
  const over = FINAL.includes(job.state);
  const { value, problem } = useAsked<ServedModels>(path(job.id, `/models?limit=${LIMIT}`), over ? 0 : LOOK_S);
  if (!value) return problem ? <Said problem={problem} /> : <Empty>Loading…</Empty>;
  const saved = value.models.flatMap((one) => one.checkpoints);
  return (
    <>
      <Said problem={problem} />
      <p class="dim" role="status">
        {summary(value)}
      </p>
      {!over && !value.models.length && <Connect />}
      {over && !value.models.length && <Empty>No client has trained a model here.</Empty>}
      {value.models.length > 0 && <Listed of={value.models} />}
      {saved.length > 0 && <Saved of={saved} />}
    </>
  );
}

function Connect(): JSX.Element {
  return (
    <section class="card" aria-label="Connect a client">
      <h2>Connect a client</h2>
      <p>Programs for the Tinker SDK train here without changes:</p>
      <pre class="words">{connection(location).join("\n")}</pre>
      <p class="dim">
        KEY is one of your API keys; if this server asks for no key, any text will do. <code>tinker.ServiceClient()</code> then finds the server, and its models appear here.
      </p>
    </section>
  );
}

function Listed({ of }: { of: ServedModel[] }): JSX.Element {
  const now = useNow(2);
  const columns: Column<ServedModel>[] = [
    ["Model", (one) => <Name of={one} />],
    ["Rank", (one) => one.rank || "all weights"],
    ["Steps", (one) => one.steps],
    ["Loss", (one) => (one.loss === null ? "–" : short(one.loss))],
    ["Over passes", (one) => <Losses of={one} />],
    ["Tokens", (one) => short(one.tokens)],
    ["Queue time", (one) => (one.passes ? queueTime(one.queue_s) : "–")],
    ["Last used", (one) => <span title={moment(one.used)}>{ago(one.used, now)}</span>, "dim"],
    ["Client", (one) => <Client isAlive={one.alive} />],
    ["Waits for", (one) => <span class="waits">{waits(one)}</span>],
  ];
  return <Table of={columns} rows={of} by={(one) => one.id} look="card served" label="Models" />;
}

function Name({ of }: { of: ServedModel }): JSX.Element {
  const notes = Object.entries(of.metadata).map(([name, value]) => `${name}: ${value}`);
  return (
    <>
      <code title={of.id}>{shortModel(of.id)}</code>
      {notes.length > 0 && <small class="dim"> {notes.join(", ")}</small>}
      {of.start && <small class="dim"> from {of.start}</small>}
    </>
  );
}

function Losses({ of }: { of: ServedModel }): JSX.Element | null {
  const { width, height } = CURVE;
  if (of.curve.length < 2) return null;
  const label = `loss from ${short(of.curve[0])} to ${short(of.curve.at(-1))} in ${of.passes} passes`;
  return (
    <svg class="curve" width={width} height={height} viewBox={`0 -1 ${width} ${height}`} role="img" aria-label={label}>
      <polyline points={sparkline(of.curve, width, height - 2)} />
    </svg>
  );
}

function Client({ isAlive }: { isAlive: boolean }): JSX.Element {
  return (
    <>
      <i class={isAlive ? "dot ready" : "dot"} />
      {isAlive ? "alive" : "gone"}
    </>
  );
}

function Saved({ of }: { of: ModelCheckpoint[] }): JSX.Element {
  const columns: Column<ModelCheckpoint>[] = [
    ["Path", (one) => <input class="path" size={one.path.length} aria-label={`Path of ${one.name}`} readOnly value={one.path} onFocus={(event) => event.currentTarget.select()} />],
    ["For", (one) => USES[one.kind] ?? one.kind],
    ["Step", (one) => one.step],
    ["Size", (one) => bytes(one.bytes)],
    ["Saved", (one) => moment(one.created), "dim"],
    ["Expires", (one) => (one.expires === null ? "never" : moment(one.expires)), "dim"],
    ["Shared with", (one) => (one.public ? "all tenants" : "")],
  ];
  return (
    <>
      <h2 class="below">Checkpoints</h2>
      <Table of={columns} rows={of} by={(one) => one.path} look="card" label="Checkpoints of models" />
    </>
  );
}
