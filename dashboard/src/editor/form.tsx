// Fields for the settings that people change most. They show what the text says, and write into it.

import type { JSX } from "preact";
import type { Json } from "../lib/types.ts";
import { hintOf, valuesOf, type Schema } from "./schema.ts";
import { kindOf, type Table } from "./text.ts";

const COMMON: Record<string, string[]> = {
  rl: [
    "name", "model.base", "environment.name", "algorithm.name", "algorithm.group_size", "algorithm.groups_per_batch",
    "algorithm.max_staleness", "rollout.max_tokens", "train.steps", "train.lr", "model.lora.rank", "resources.rollout_workers",
  ],
  sft: ["name", "model.base", "data.path", "data.batch_size", "data.epochs", "train.steps", "train.lr", "model.lora.rank"],
  dpo: ["name", "model.base", "data.path", "data.batch_size", "data.epochs", "train.steps", "train.lr", "model.lora.rank"],
  eval: ["name", "model.base", "environment.name", "evaluation.episodes", "evaluation.samples", "rollout.max_tokens"],
  inference: ["name", "model.base", "resources.rollout_workers", "serving.idle_s"],
  tinker: ["name", "model.base", "tinker.max_rank", "tinker.max_adapters", "tinker.tokens_per_minute", "resources.rollout_workers"],
}; // prettier-ignore

interface Props {
  /** What the text says; null: it cannot be read. */
  spec: Table | null;
  schema: Schema;
  known: (path: string) => string[];
  set: Setting;
}

/** Writes a setting into the text; undefined takes it out. */
type Setting = (path: string, value: Json | undefined) => void;

export function Form({ spec, schema, known, set }: Props): JSX.Element {
  if (!spec) return <p class="dim">The text cannot be read: see the marked place.</p>;
  return (
    <div class="form">
      {(COMMON[kindOf(spec)] ?? COMMON["rl"]!).map((path) => (
        <Field key={path} path={path} value={at(spec, path)} schema={schema} known={known(path)} set={set} />
      ))}
    </div>
  );
}

function at(spec: Table, path: string): Json | undefined {
  let found: Json | undefined = spec;
  for (const part of path.split(".")) {
    found = typeof found === "object" && found !== null && !Array.isArray(found) ? (found as Table)[part] : undefined;
  }
  return found;
}

interface FieldProps {
  path: string;
  value: Json | undefined;
  schema: Schema;
  known: string[];
  set: Setting;
}

function Field({ path, value, schema, known, set }: FieldProps): JSX.Element {
  const listed = valuesOf(schema, path).map(String);
  const [meaning = "", ...facts] = hintOf(schema, path).split("\n");
  const usual = /default (.*)$/.exec(facts.join("\n"))?.[1]?.replace(/^"|"$/g, "") ?? "";
  const shown = value === undefined || typeof value === "object" ? "" : String(value);
  const write = (text: string): void => {
    if (text === shown) return;
    if (!text.trim()) set(path, undefined);
    else set(path, valueOf(text.trim(), listed.length > 0 || !takesNumbers(schema, path)));
  };
  const all = listed.length ? listed : known;
  return (
    <label title={[meaning, ...facts].join("\n")}>
      <span>{path}</span>
      <input
        key={shown}
        list={all.length ? `known-${path}` : undefined}
        defaultValue={shown}
        placeholder={path.split(".").length > 2 ? "none" : usual}
        spellcheck={false}
        onChange={(event) => write(event.currentTarget.value)}
      />
      {all.length > 0 && (
        <datalist id={`known-${path}`}>
          {all.map((one) => (
            <option key={one} value={one} />
          ))}
        </datalist>
      )}
    </label>
  );
}

function takesNumbers(schema: Schema, path: string): boolean {
  return /\d|at least|more than/.test(hintOf(schema, path).split("\n").slice(1).join("\n"));
}

function valueOf(text: string, asText: boolean): Json {
  const number = Number(text.replaceAll("_", ""));
  return asText || Number.isNaN(number) ? text : number;
}
