// A long table of rows of one height: which of them are drawn, which are chosen, and what keys do.

import type { Job, SweepSummary } from "../types.ts";
import { FIRST_SORT, valueOf, type ListView } from "./view.ts";

export interface Span {
  from: number;
  to: number;
}

/** The span moves by so many rows at a time, so that few scroll events draw anything. */
const BLOCK = 10;

/** The rows that are seen, and some around them. `top`: pixels of the table above the window's upper edge. */
export function windowed(count: number, rowPx: number, top: number, heightPx: number, around = 12): Span {
  const first = BLOCK * Math.floor((Math.floor(top / rowPx) - around) / BLOCK);
  const last = BLOCK * Math.ceil((Math.ceil((top + heightPx) / rowPx) + around) / BLOCK);
  const from = Math.max(0, Math.min(first, count));
  return { from, to: Math.max(from, Math.min(last, count)) };
}

/** What is chosen after a click on `id`; with shift all from the last click on, as far as they are listed. */
export function picked(chosen: ReadonlySet<string>, ids: string[], id: string, last: string | null, shift: boolean): Set<string> {
  const next = new Set(chosen);
  const on = !chosen.has(id);
  const [a, b] = [ids.indexOf(last ?? id), ids.indexOf(id)];
  const range = shift && a >= 0 ? ids.slice(Math.min(a, b), Math.max(a, b) + 1) : [id];
  for (const one of range) on ? next.add(one) : next.delete(one);
  return next;
}

/** What a key means in a list of jobs; undefined: nothing. */
export type Deed = "down" | "up" | "open" | "pick" | "all" | "clear" | "search" | "compare" | "tag" | "cancel" | "delete" | "help";
const KEYS: Record<string, Deed> = {
  j: "down",
  ArrowDown: "down",
  k: "up",
  ArrowUp: "up",
  Enter: "open",
  x: "pick",
  a: "all",
  Escape: "clear",
  "/": "search",
  c: "compare",
  t: "tag",
  s: "cancel",
  d: "delete",
  "?": "help",
};

export function deedOf(key: string, typing: boolean, modified: boolean): Deed | undefined {
  return typing || modified ? undefined : KEYS[key];
}

/** Where `g` and then a key goes, from every view. */
const PLACES: Record<string, string[]> = {
  j: [],
  w: ["sweeps"],
  m: ["checkpoints"],
  e: ["environments"],
  c: ["cluster"],
  s: ["submit"],
};

/** The view that a key means after `before`; undefined: none. */
export function placeOf(before: string, key: string): string[] | undefined {
  return before === "g" ? PLACES[key] : undefined;
}

/** Whether keys are text for what has the focus. */
export function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.closest('input:not([type="checkbox"]), select, textarea, [contenteditable="true"]') !== null;
}

/** Whether a job or a sweep has all of these words, as the server searches; of notes and keys' names only the server knows. */
export function matches(one: Job | SweepSummary, text: string): boolean {
  const has = [one.id, one.name, one.kind, one.model, one.environment ?? "", one.project, one.key, ...one.tags].join("\n").toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => has.includes(word));
}

/** Of jobs or sweeps that were listed already those which the view asks for, until the server has answered; none where only
 * the server can tell. */
export function knownTo<T extends Job | SweepSummary>(view: ListView, seen: Iterable<T>): T[] {
  const state = valueOf(view.labels, "state");
  if (view.sort !== FIRST_SORT || view.labels.some(([name]) => name !== "state")) return [];
  return [...seen].filter((one) => (!state || one.state === state) && matches(one, view.search.trim()));
}

/** Points of a polyline in a box; the lowest value is at its bottom. */
export function sparkline(values: number[], width: number, height: number): string {
  const low = Math.min(...values);
  const span = Math.max(...values) - low || 1;
  const step = width / Math.max(1, values.length - 1);
  return values.map((value, at) => `${(at * step).toFixed(1)},${(height - ((value - low) / span) * height).toFixed(1)}`).join(" ");
}

/** Left out first where a window is narrower than so many pixels, until people choose columns themselves. */
const NEEDS_PX: Record<string, number> = { Owner: 1600, Model: 1500, Environment: 1350, Curve: 1200, Project: 1200, Last: 1000 };
/** Shown only where people choose them. */
const ON_CHOICE = ["Kind", "Notes", "Updated", "Finished"];
/** Up to this width rows are cards, where these need no width. */
const PHONE_PX = 720;
const ON_PHONES = ["Last", "Curve"];

/** A choice of columns, as it is kept: unknown names are dropped; before there is one, those for which there is room. */
export function columnsOf(kept: string | null, all: readonly string[], widthPx: number): string[] {
  const fits = (name: string): boolean => widthPx >= (NEEDS_PX[name] ?? 0) || (widthPx <= PHONE_PX && ON_PHONES.includes(name));
  if (kept === null) return all.filter((name) => !ON_CHOICE.includes(name) && fits(name));
  const names = kept.split(",");
  return all.filter((name) => names.includes(name));
}
