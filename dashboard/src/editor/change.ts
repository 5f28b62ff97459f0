// Writes a setting into the text of a spec, or takes it out, and leaves the rest of the text as it is.

import { stringify } from "smol-toml";
import type { Json } from "../lib/types.ts";
import { floatsIn, withFloats } from "./floats.ts";
import { isJson, placesIn, type Place } from "./places.ts";

/** A replacement of a part of the text. */
export interface Change {
  from: number;
  to: number;
  insert: string;
}

/** What has to be replaced so that a setting has this value. */
export function changeOf(text: string, path: string, value: Json): Change {
  if (isJson(text)) return { from: 0, to: text.length, insert: changedJson(text, path, value) };
  const places = placesIn(text);
  const written = valueText(value);
  const found = settingIn(places, path);
  if (found) return { from: found.valueFrom, to: found.valueTo, insert: written };
  const table = parentOf(path);
  if (!table) return { from: 0, to: 0, insert: `${path} = ${written}\n` };
  const above = places.find((one) => one.path === table);
  if (above?.kind === "header") return { from: above.to, to: above.to, insert: `\n${within(table, path)} = ${written}` };
  for (let owner = table; owner; owner = parentOf(owner)) {
    const inline = places.find((one) => one.path === owner && one.kind === "inline");
    if (inline) return intoInline(text, inline, `${within(owner, path)} = ${written}`);
    const dotted = places.find((one) => isDotted(one, owner));
    if (dotted) return besides(text, places, dotted, `${within(dotted.table, path)} = ${written}`);
  }
  const end = text.trimEnd().length;
  return { from: end, to: text.length, insert: `${end ? "\n\n" : ""}[${table}]\n${within(table, path)} = ${written}\n` };
}

/** What has to be replaced so that the text no longer has a setting; null: it has none. */
export function removalOf(text: string, path: string): Change | null {
  const places = placesIn(text);
  const found = settingIn(places, path);
  if (!found) return null;
  if (isJson(text)) return { from: 0, to: text.length, insert: changedJson(text, path, undefined) };
  if (isInline(places, found.table)) return outOfInline(text, found);
  return { from: text.lastIndexOf("\n", found.from - 1) + 1, to: Math.min(lineEnd(text, found.valueTo) + 1, text.length), insert: "" };
}

function settingIn(places: Place[], path: string): Place | undefined {
  return places.find((one) => one.path === path && one.kind !== "header");
}

function parentOf(path: string): string {
  return path.slice(0, Math.max(0, path.lastIndexOf(".")));
}

/** A setting's name as it is written in a table. */
function within(table: string, path: string): string {
  return table ? path.slice(table.length + 1) : path;
}

/** Whether this is written as `owner.name`: TOML allows no header for `owner` then. */
function isDotted(place: Place, owner: string): boolean {
  return place.kind !== "header" && place.path.startsWith(`${owner}.`) && (!place.table || owner.startsWith(`${place.table}.`));
}

function isInline(places: Place[], table: string): boolean {
  return places.some((one) => one.path === table && one.kind === "inline");
}

function besides(text: string, places: Place[], place: Place, entry: string): Change {
  if (isInline(places, place.table)) return { from: place.valueTo, to: place.valueTo, insert: `, ${entry}` };
  const end = lineEnd(text, place.valueTo);
  return { from: end, to: end, insert: `\n${entry}` };
}

function intoInline(text: string, inline: Place, entry: string): Change {
  const inside = text.slice(inline.valueFrom + 1, inline.valueTo - 1);
  const kept = inside.trimEnd();
  const from = inline.valueFrom + 1 + kept.length;
  const comma = kept.trim() && !kept.endsWith(",") ? "," : "";
  return { from, to: inline.valueTo - 1, insert: `${comma} ${entry} ` };
}

/** With the comma behind it, or else that before it. */
function outOfInline(text: string, place: Place): Change {
  const behind = /^\s*,\s*/.exec(text.slice(place.valueTo))?.[0].length ?? 0;
  const before = behind ? 0 : (/,\s*$/.exec(text.slice(0, place.from))?.[0].length ?? 0);
  return { from: place.from - before, to: place.valueTo + behind, insert: "" };
}

function lineEnd(text: string, from: number): number {
  const found = text.indexOf("\n", from);
  return found < 0 ? text.length : found;
}

function valueText(value: Json): string {
  return stringify({ value: value as string }).trimEnd().slice("value = ".length);
}

/** `value` undefined: without the setting. */
function changedJson(text: string, path: string, value: Json | undefined): string {
  const spec = JSON.parse(text) as { [name: string]: Json };
  const parts = path.split(".");
  let table = spec;
  for (const part of parts.slice(0, -1)) table = (table[part] ??= {}) as typeof table;
  const last = parts[parts.length - 1]!;
  if (value === undefined) delete table[last];
  else table[last] = value;
  return withFloats(JSON.stringify(spec, null, 2), floatsIn(text));
}
