// A spec, written with what the server knows about it, and looked at by the queue before it is a job.

import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { SpecEditor, Mark } from "../editor/editor.ts";
import { changeOf, removalOf } from "../editor/change.ts";
import { floatsIn } from "../editor/floats.ts";
import { Form } from "../editor/form.tsx";
import { placeOf, placesIn } from "../editor/places.ts";
import type { Schema } from "../editor/schema.ts";
import { environmentIn, environmentNames, withConfig } from "../editor/suggest.ts";
import type { Curve, Template } from "../editor/templates.ts";
import { posted, readSpec, Unreadable, writeSpec, type Table } from "../editor/text.ts";
import { go, useAsked, useDoing, useMay, useSettled } from "../hooks.ts";
import { ask, fetched, job as path, onceKey, Problem, type Asking } from "../lib/api.ts";
import { sparkline } from "../lib/jobs/rows.ts";
import { cloneSpec, sweepOf } from "../lib/serve.ts";
import type { About, Job, JobDetail, Json, Sweep, SweepSummary } from "../lib/types.ts";
import { counted, duration, short } from "../lib/words.ts";
import { Said } from "../parts.tsx";

interface Estimate {
  jobs: number;
  steps: number;
  seconds: number;
  worker_s: number;
  gpu_s: number;
  cost: number | null;
  currency: string;
  basis: string;
}

interface Report {
  valid: boolean;
  mistakes: { field: string; problem: string; value: Json }[];
  checks: { what: string; found: string; result: string; hint: string }[];
  estimate: Estimate | null;
}

type Scope = "all" | "queue" | "spec";

const SETTLES_MS = 900;
/** Env workers and pushed environments come and go. */
const KNOWN_S = 15;
const OF_SPEC = "spec.";
const CURVE = { width: 120, height: 28 };

/** Raises Unreadable. */
async function report(text: string, scope: Scope): Promise<Report> {
  return ask<Report>(`/v1/validate?scope=${scope}`, posted(text));
}

export function Submit({ from, step }: { from: string; step: string }): JSX.Element {
  const source = useAsked<Source>(from ? path(from) : null, 0, sourceOf);
  const schema = useAsked<Schema>("/v1/schema/job.json");
  const [text, setText] = useState("");
  const editor = useRef<SpecEditor | null>(null);
  const { doing, problem, act } = useDoing();
  const once = useRef(""); // one key per text: an answer that was lost makes no second job
  const [whole, setWhole] = useState<Report | null>(null);
  const changed = (given: string): void => {
    once.current = "";
    setText(given);
    setWhole(null);
  };
  const show = (given: string): void => {
    editor.current?.show(given);
    changed(given);
  };
  useEffect(() => {
    if (!source.value || !schema.value) return;
    const { job, floats, sweep } = source.value;
    show(writeSpec(cloneSpec(job, step, sweep), schema.value, floats));
  }, [source.value, schema.value]);
  const spec = read(text);
  const validate = (): void => act(async () => setWhole(await report(readable(text), "all")));
  const submit = (): void =>
    act(async () => {
      const { headers, ...body } = posted(readable(text));
      const made = await ask<Job | SweepSummary>("/v1/jobs", { ...body, headers: { ...headers, "Idempotency-Key": (once.current ||= onceKey()) } });
      go("best" in made ? "sweeps" : "jobs", made.id);
    });
  const known = useKnown();
  const configured = useConfigured(schema.value, text, known("environment.name"));
  const set = (setting: string, value: Json | undefined): void => {
    const change = value === undefined ? removalOf(text, setting) : changeOf(text, setting, value);
    if (change) editor.current?.change(change);
  };
  const goTo = (at: number): void => editor.current?.goTo(at);
  return (
    <section class="card submit">
      <h1>{from ? (step ? `Continue from ${from}, step ${step}` : `Clone ${from}`) : "Submit a job"}</h1>
      <Said problem={source.problem ?? schema.problem ?? problem} />
      <div class="sides">
        <div>
          <Bar show={show} />
          <Text text={text} schema={configured} known={known} editor={editor} changed={changed} />
          <div class="bar">
            <button disabled={doing} onClick={validate}>
              Validate
            </button>
            <button class="main" disabled={doing} onClick={submit}>
              Submit
            </button>
            {doing && <small class="dim">checking…</small>}
          </div>
          {whole && <Checked report={whole} text={text} goTo={goTo} />}
        </div>
        <aside>
          {!from && !text && <Templates show={show} />}
          <h2>What the queue would do</h2>
          <Queue spec={spec} text={text} goTo={goTo} />
          {schema.value && (
            <>
              <h2>Common settings</h2>
              <Form spec={spec} schema={schema.value} known={known} set={set} />
            </>
          )}
          {!from && text && <Templates show={show} />}
        </aside>
      </div>
    </section>
  );
}

/** The job whose spec the text begins with. */
interface Source {
  job: JobDetail;
  /** Settings of its spec that are floats although they are whole numbers. */
  floats: Set<string>;
  /** The sweep that it belongs to, or empty. */
  sweep: string;
}

async function sourceOf(address: string, asking: Asking): Promise<Source> {
  const text = await (await fetched(address, asking)).text();
  const floats = [...floatsIn(text)].flatMap((one) => (one.startsWith(OF_SPEC) ? one.slice(OF_SPEC.length) : []));
  const job = JSON.parse(text) as JobDetail;
  return { job, floats: new Set(floats), sweep: await sweepOf(job, (id) => ask<Sweep>(`/v1/sweeps/${id}`, asking)) };
}

function read(text: string): Table | null {
  try {
    return readSpec(text);
  } catch {
    return null;
  }
}

/** The text, if it can be read. */
function readable(text: string): string {
  try {
    readSpec(text);
    return text;
  } catch (error) {
    throw new Problem(0, `neither valid TOML nor JSON: ${error instanceof Error ? error.message : String(error)}`);
  }
}

/** Names that the schema cannot list: what this server has. */
function useKnown(): (path: string) => string[] {
  const environments = useAsked<{ environments: { name: string }[]; built_in: string[] }>(useMay("environments:read") ? "/v1/environments" : null, KNOWN_S);
  const asked = useAsked<{ jobs: Job[] }>(useMay("jobs:read") ? "/v1/jobs?limit=50" : null);
  const jobs = asked.value?.jobs ?? [];
  return (setting) => {
    if (setting === "environment.name") return environmentNames(environments.value, jobs.map((one) => one.environment));
    if (setting === "model.base") return [...new Set(jobs.map((one) => one.model))];
    if (setting === "start.from") return jobs.filter((one) => one.step > 0).map((one) => `${one.id}@latest`);
    return [];
  };
}

/** The schema with the settings of the spec's environment, once an env worker has said them. */
function useConfigured(schema: Schema | null, text: string, names: string[]): Schema | null {
  const named = environmentIn(text);
  const name = names.includes(named) ? named : "";
  const { value } = useAsked<About>(useMay("environments:read") && name ? `/v1/environment?name=${encodeURIComponent(name)}` : null);
  return useMemo(() => (schema && value ? withConfig(schema, value.settings as Schema) : schema), [schema, value]);
}

function Bar({ show }: { show: (text: string) => void }): JSX.Element {
  return (
    <div class="bar">
      <label class="file">
        Open a file…
        <input type="file" accept=".toml,.json" onChange={(event) => void event.currentTarget.files?.[0]?.text().then(show)} />
      </label>
      <small class="dim">TOML or JSON; paths are those of the server. Ctrl+Space completes; point at a name to see what it means.</small>
    </div>
  );
}

interface TextProps {
  text: string;
  schema: Schema | null;
  known: (path: string) => string[];
  editor: { current: SpecEditor | null };
  changed: (text: string) => void;
}

/** The editor, and until it is loaded a plain field. */
function Text({ text, schema, known, editor, changed }: TextProps): JSX.Element {
  const host = useRef<HTMLDivElement>(null);
  const [loaded, setLoaded] = useState(false);
  const now = useRef({ text, known, changed, schema });
  now.current = { text, known, changed, schema };
  const isReady = schema !== null;
  useEffect(() => {
    if (!isReady) return;
    let closed = false;
    void import("../editor/editor.ts").then(({ editSpec }) => {
      if (closed || !host.current) return;
      editor.current = editSpec(host.current, now.current.text, {
        changed: (given) => now.current.changed(given),
        known: (setting) => now.current.known(setting),
        schema: () => now.current.schema ?? {},
        marks,
      });
      setLoaded(true);
    });
    return () => {
      closed = true;
      editor.current?.close();
      editor.current = null;
      setLoaded(false);
    };
  }, [isReady]);
  return (
    <>
      {!loaded && (
        <textarea aria-label="Spec" spellcheck={false} rows={24} value={text} onInput={(event) => changed(event.currentTarget.value)} />
      )}
      <div class="editor" ref={host} />
    </>
  );
}

/** The mistakes in a text, at their places. None while the server does not answer: Validate says so. */
async function marks(text: string): Promise<Mark[]> {
  if (!text.trim()) return [];
  try {
    const found = await report(text, "spec");
    const places = placesIn(text);
    return found.mistakes.map((one) => {
      const place = placeOf(places, one.field);
      const shown = place ? { from: place.from, to: place.to } : { from: 0, to: firstLine(text) };
      return { ...shown, message: place?.path === one.field ? one.problem : `${one.field}: ${one.problem}` };
    });
  } catch (error) {
    if (error instanceof Unreadable) return [{ from: error.at, to: Math.min(error.at + 1, text.length), message: error.message }];
    if (error instanceof Problem) return [];
    throw error;
  }
}

function firstLine(text: string): number {
  const end = text.indexOf("\n");
  return end < 0 ? text.length : end;
}

/** What the queue would do now; requested again once the text has settled. */
function Queue({ spec, text, goTo }: { spec: Table | null; text: string; goTo: (at: number) => void }): JSX.Element {
  const wanted = useSettled(spec && Object.keys(spec).length ? text : "", SETTLES_MS);
  const [found, setFound] = useState<Report | Problem | null>(null);
  useEffect(() => {
    let late = false;
    setFound(null);
    if (wanted) {
      report(wanted, "queue").then(
        (answer) => late || setFound(answer),
        (error: unknown) => late || setFound(error instanceof Problem ? error : new Problem(0, String(error))),
      );
    }
    return () => void (late = true);
  }, [wanted]);
  if (found instanceof Problem) return <p class="dim">{found.message}</p>;
  if (!found) return <p class="dim">{spec && Object.keys(spec).length ? "…" : "Nothing yet: the text is empty or cannot be read."}</p>;
  if (found.mistakes.length) {
    return (
      <>
        <p>{counted(found.mistakes.length, "mistake")} to correct first:</p>
        <ul>
          <Mistakes of={found.mistakes} text={text} goTo={goTo} />
        </ul>
      </>
    );
  }
  return (
    <div role="status">
      <ul class="plain">
        {found.checks.filter((one) => one.what !== "spec").map((one) => (
          <li key={one.what} class={one.result}>
            {one.what}: {one.found} {one.hint && <span class="dim">({one.hint})</span>}
          </li>
        ))}
      </ul>
      <Taken estimate={found.estimate} />
    </div>
  );
}

function Taken({ estimate }: { estimate: Estimate | null }): JSX.Element {
  if (!estimate)
    return (
      <p class="dim">
        No estimate: no similar job has run here, and nothing else tells how long it takes. <code>opentinker plan</code> takes durations from you.
      </p>
    );
  const hours = [`${short(estimate.worker_s / 3600)} worker hours`];
  if (estimate.gpu_s) hours.push(`${short(estimate.gpu_s / 3600)} GPU hours`);
  if (estimate.cost !== null) hours.push(`${estimate.cost.toFixed(2)} ${estimate.currency}`);
  return (
    <p>
      <b>{duration(estimate.seconds)}</b>
      {estimate.jobs > 1 ? ` each, ${counted(estimate.jobs, "job")}` : ""}, {hours.join(", ")}
      <br />
      <small class="dim">{estimate.basis}</small>
    </p>
  );
}

function Templates({ show }: { show: (text: string) => void }): JSX.Element {
  const [all, setAll] = useState<Template[]>([]);
  useEffect(() => void import("../editor/templates.ts").then((found) => setAll(found.TEMPLATES)), []);
  return (
    <>
      <h2>Templates</h2>
      <ul class="templates">
        {all.map((one) => (
          <li key={one.name}>
            <button onClick={() => show(one.text)}>{one.name}</button>
            {one.curve && <Expected of={one.curve} />}
            {one.note && <small class="dim">{one.note}</small>}
          </li>
        ))}
      </ul>
    </>
  );
}

function Expected({ of: curve }: { of: Curve }): JSX.Element {
  const last = short(curve.values[curve.values.length - 1]);
  const { metric, trials, steps } = curve;
  return (
    <>
      <svg class="curve" width={CURVE.width} height={CURVE.height} role="img" aria-label={`expected ${metric}`}>
        <polyline points={sparkline(curve.values, CURVE.width, CURVE.height - 2)} />
      </svg>
      <small class="dim">
        {trials ? `best ${metric} of ${counted(trials, "trial")}: ${last}` : `${metric} to ${last} in ${counted(steps ?? 0, "step")}`}
      </small>
    </>
  );
}

interface MistakesProps {
  of: Report["mistakes"];
  text: string;
  goTo: (at: number) => void;
}

function Mistakes({ of, text, goTo }: MistakesProps): JSX.Element {
  const places = placesIn(text);
  return (
    <>
      {of.map((one) => {
        const place = placeOf(places, one.field);
        return (
          <li key={one.field + one.problem}>
            <code>{one.field}</code> {one.problem}{" "}
            {place && (
              <button class="plain" onClick={() => goTo(place.from)}>
                line {text.slice(0, place.from).split("\n").length}
              </button>
            )}
          </li>
        );
      })}
    </>
  );
}

function Checked({ report: found, text, goTo }: { report: Report; text: string; goTo: (at: number) => void }): JSX.Element {
  return (
    <div role="status">
      <p class={found.valid ? "good" : "problem"}>{found.valid ? "The job can run." : "The job cannot run."}</p>
      <ul>
        <Mistakes of={found.mistakes} text={text} goTo={goTo} />
        {found.checks.map((one) => (
          <li key={one.what + one.found} class={one.result}>
            <b>{one.result}</b> {one.what}: {one.found} {one.hint && <span class="dim">({one.hint})</span>}
          </li>
        ))}
      </ul>
    </div>
  );
}
