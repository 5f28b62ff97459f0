// Writes a setting into the text of a spec, and leaves the rest of it as it is.

import { stringify } from "smol-toml";
import type { Json } from "../lib/types.ts";
import { isJson, placesIn } from "./places.ts";

/** A replacement of a part of the text. */
export interface Change {
  from: number;
  to: number;
  insert: string;
}

/** What has to be replaced so that a setting has this value. */
export function changeOf(text: string, path: string, value: Json): Change {
  if (isJson(text)) return { from: 0, to: text.length, insert: withJson(text, path, value) };
  const places = placesIn(text);
  const written = valueText(value);
  const found = places.find((one) => one.path === path && one.kind !== "header");
  if (found) return { from: found.valueFrom, to: found.valueTo, insert: written };
  const dot = path.lastIndexOf(".");
  const [table, name] = dot < 0 ? ["", path] : [path.slice(0, dot), path.slice(dot + 1)];
  if (!table) return { from: 0, to: 0, insert: `${name} = ${written}\n` };
  const above = places.find((one) => one.path === table);
  if (above?.kind === "header") return { from: above.to, to: above.to, insert: `\n${name} = ${written}` };
  if (above?.kind === "inline") {
    const inside = text.slice(above.valueFrom + 1, above.valueTo - 1);
    const kept = inside.trimEnd();
    const from = above.valueFrom + 1 + kept.length;
    const comma = kept.trim() && !kept.endsWith(",") ? "," : "";
    return { from, to: above.valueTo - 1, insert: `${comma} ${name} = ${written} ` };
  }
  const end = text.trimEnd().length;
  return { from: end, to: text.length, insert: `${end ? "\n\n" : ""}[${table}]\n${name} = ${written}\n` };
}

function valueText(value: Json): string {
  return stringify({ value: value as string }).trimEnd().slice("value = ".length);
}

function withJson(text: string, path: string, value: Json): string {
  const spec = JSON.parse(text) as { [name: string]: Json };
  const parts = path.split(".");
  let table = spec;
  for (const part of parts.slice(0, -1)) table = (table[part] ??= {}) as typeof table;
  table[parts[parts.length - 1]!] = value;
  return JSON.stringify(spec, null, 2);
}
