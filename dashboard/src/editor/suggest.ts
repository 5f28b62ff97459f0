// What may be written at a position of a spec: names of settings, or values of one. In [sweep.parameters] the names are
// those of the settings that are varied, and then how.

import type { Json } from "../lib/types.ts";
import { isJson, placesIn, spotAt } from "./places.ts";
import { formsAt, hintOf, settingsOf, valuesOf, type Option, type Schema } from "./schema.ts";

const VARIED = /^sweep\.parameters(?:\.(.*))?$/;
/** One value in a list of values. */
const ONE_OF = /(\.values)?\.\d+$/;
/** Settings that a sweep cannot vary. */
const FIXED = new Set(["kind", "sweep", "name", "project", "tags", "notes", "notify"]);

export interface Suggestion {
  label: string;
  /** What is written for it. */
  apply: string;
  kind: "table" | "setting" | "constant" | "known";
  meaning: string;
}

/** `known` names values of a setting that the schema cannot list. `asked`: the user asked for suggestions. */
export function suggestions(
  text: string,
  schema: Schema,
  known: (path: string) => string[],
  asked = true,
): { from: number; options: Suggestion[] } | null {
  const spot = spotAt(text);
  if (!spot || (!asked && spot.from === text.length && spot.role === "name")) return null;
  const options = spot.role === "name" ? names(schema, spot.path).map(named(isJson(text))) : values(schema, spot.path, known);
  return options.length ? { from: spot.from, options } : null;
}

/** What is said of the setting at a path. */
export function meaningAt(schema: Schema, path: string): string {
  return hintOf(...described(schema, path));
}

function names(schema: Schema, path: string): Option[] {
  const varied = VARIED.exec(path);
  if (!varied) return settingsOf(schema, path);
  const setting = varied[1] ?? "";
  const inner = settingsOf(schema, setting);
  if (!setting) return inner.filter((one) => !FIXED.has(one.name));
  return inner.length || !formsAt(schema, setting).length ? inner : settingsOf(ways(schema), "");
}

function named(quoted: boolean): (one: Option) => Suggestion {
  return (one) => ({
    label: one.name,
    apply: quoted ? `"${one.name}"` : one.name,
    kind: one.isTable ? "table" : "setting",
    meaning: one.meaning.replaceAll("`", ""),
  });
}

function values(schema: Schema, path: string, known: (path: string) => string[]): Suggestion[] {
  const [root, setting] = described(schema, path);
  const written = (kind: Suggestion["kind"]): ((value: Json) => Suggestion) => {
    return (value) => ({ label: JSON.stringify(value), apply: JSON.stringify(value), kind, meaning: "" });
  };
  return [...valuesOf(root, setting).map(written("constant")), ...known(setting).map(written("known"))];
}

/** The schema that describes what stands at a path, and its path there. */
function described(schema: Schema, path: string): [Schema, string] {
  const varied = VARIED.exec(path);
  if (!varied?.[1]) return [schema, path];
  const setting = varied[1].replace(ONE_OF, "");
  if (formsAt(schema, setting).length) return [schema, setting];
  return [ways(schema), setting.slice(setting.lastIndexOf(".") + 1)];
}

/** How a setting is varied: `low`, `high`, ... */
function ways(schema: Schema): Schema {
  return { ...schema.$defs?.["SweepParameter"], ...(schema.$defs ? { $defs: schema.$defs } : {}) };
}

/** The schema of a spec whose environment has these settings. */
export function withConfig(schema: Schema, config: Schema): Schema {
  const own = schema.$defs?.["EnvironmentSpec"];
  if (!own) return schema;
  return { ...schema, $defs: { ...config.$defs, ...schema.$defs, EnvironmentSpec: { ...own, properties: { ...own.properties, config } } } };
}

/** Names of environments as a spec has them, each once: what env workers offer, what was pushed, what jobs have used. */
export function environmentNames(offered: { environments: { name: string }[]; built_in: string[] } | null, used: (string | undefined)[]): string[] {
  const pushed = (offered?.environments ?? []).map((one) => `upload:${one.name}`);
  return [...new Set([...(offered?.built_in ?? []), ...pushed, ...used])].filter((name): name is string => Boolean(name));
}

/** The environment that a text names, also while the rest of it cannot be read; empty: none. */
export function environmentIn(text: string): string {
  const place = placesIn(text).find((one) => one.path === "environment.name");
  const value = place ? text.slice(place.valueFrom, place.valueTo) : "";
  return /^(["'])([^"'\\\n]*)\1$/.exec(value)?.[2] ?? "";
}
