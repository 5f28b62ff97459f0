import assert from "node:assert/strict";
import { test } from "node:test";
import { Heard } from "../../src/lib/live/join.ts";
import { Refill } from "../../src/lib/live/refill.ts";
import { browser } from "../browser.ts";

const heardOf = (...seqs: number[]): Heard => {
  const heard = new Heard();
  for (const seq of seqs) heard.note("trainer", "a", seq);
  return heard;
};

test("a gap is read for again until it is filled", async (t) => {
  const { pass } = browser(t, () => ({}));
  const heard = heardOf(0, 2);
  let reads = 0;
  const notes: (string | number)[] = [];
  const history = new Refill(heard, async () => void ((reads += 1) === 3 && heard.note("trainer", "a", 1)), (missing, problem) => notes.push(problem || missing));
  void history.ask();
  assert.equal(history.busy, true);
  await pass(10);
  assert.deepEqual([reads, heard.gaps(), heard.missing, notes.at(-1), history.busy], [3, [], 0, 0, false]);
  assert.ok(notes.includes(1));
});

test("what the history does not have either is given up, and asked for no more", async (t) => {
  const { pass } = browser(t, () => ({}));
  const heard = heardOf(0, 3);
  let reads = 0;
  const history = new Refill(heard, async () => void (reads += 1), () => {});
  void history.ask();
  await pass(10);
  assert.deepEqual([heard.gaps(), heard.missing], [[], 2]);
  const before = reads;
  void history.ask();
  await pass(10);
  assert.equal(reads, before + 1);
});

test("a history that cannot be read gives nothing up", async (t) => {
  const { pass } = browser(t, () => ({}));
  const heard = heardOf(0, 2);
  const notes: string[] = [];
  const history = new Refill(heard, () => Promise.reject(new Error("away")), (_, problem) => notes.push(problem));
  void history.ask();
  await pass(10);
  assert.deepEqual([notes, heard.gaps().length, heard.missing], [["away"], 1, 0]);
});
