// The text of a spec: read as the server reads it, and written with nothing in it that is usual.

import { parse, stringify, TomlError } from "smol-toml";
import type { Json } from "../lib/types.ts";
import { settings } from "../lib/spec.ts";
import type { Schema } from "./schema.ts";
import { floatsIn, withFloats } from "./floats.ts";
import { isJson, placesIn } from "./places.ts";

export type Table = { [name: string]: Json };

/** Characters; the server reads longer specs as JSON alone. */
const MOST_TOML = 1 << 16;
const ENDLESS = /^[+-]?(inf|nan)$/;

/** A text that is no TOML or JSON, and where. */
export class Unreadable extends Error {
  readonly at: number;

  constructor(message: string, at: number) {
    super(message);
    this.at = at;
  }
}

/** For a look at it: the server reads the text itself, where 1.0 is no 1. Raises Unreadable. */
export function readSpec(text: string): Table {
  try {
    if (isJson(text)) return JSON.parse(text) as Table;
    const found = parse(text);
    const endless = placesIn(text).find((one) => ENDLESS.test(text.slice(one.valueFrom, one.valueTo)));
    if (endless) throw new Unreadable(`${endless.path}: inf and nan are not allowed`, endless.valueFrom);
    return JSON.parse(JSON.stringify(found)) as Table;
  } catch (error) {
    if (error instanceof Unreadable) throw error;
    const why = error instanceof Error ? error.message : String(error);
    if (error instanceof TomlError) throw new Unreadable(why.split("\n", 1)[0]!, offset(text, error.line, error.column));
    throw new Unreadable(why, Number(/position (\d+)/.exec(why)?.[1] ?? 0));
  }
}

function offset(text: string, line: number, column: number): number {
  let from = 0;
  for (let count = 1; count < line; count++) from = text.indexOf("\n", from) + 1;
  return Math.min(from + Math.max(0, column - 1), text.length);
}

/** For the server: the text as it is, or as JSON where the server takes no TOML of that length. Raises Unreadable. */
export function posted(text: string): { method: string; text: string; headers: Record<string, string> } {
  const spec = readSpec(text);
  const asToml = !isJson(text) && text.length <= MOST_TOML;
  const sent = asToml || isJson(text) ? text : withFloats(JSON.stringify(spec), floatsIn(text));
  return { method: "POST", text: sent, headers: { "Content-Type": asToml ? "application/toml" : "application/json" } };
}

/** A whole spec as TOML, without what is as usual; as JSON where TOML has no word for a value (null). `floats`: its settings
 * that are whole numbers and floats nevertheless. */
export function writeSpec(spec: Json, schema: Schema, floats: ReadonlySet<string>): string {
  const own: Table = {};
  for (const one of settings(spec, { ...schema.$defs, JobSpec: schema })) {
    if (!one.differs) continue;
    const parts = one.path.split(".");
    let table = own;
    for (const part of parts.slice(0, -1)) table = (table[part] ??= {}) as Table;
    table[parts[parts.length - 1]!] = one.value;
  }
  return withFloats(hasNull(own) ? JSON.stringify(own, null, 2) : `${stringify(own).trimEnd()}\n`, floats);
}

function hasNull(value: Json): boolean {
  return value === null || (typeof value === "object" && Object.values(value).some(hasNull));
}

/** The kind of a job, or of a sweep's jobs. */
export function kindOf(spec: Table): string {
  const sweep = spec["sweep"];
  const own = typeof sweep === "object" && sweep !== null && !Array.isArray(sweep) ? sweep["kind"] : undefined;
  const kind = spec["kind"] === "sweep" ? own : spec["kind"];
  return typeof kind === "string" ? kind : "rl";
}
