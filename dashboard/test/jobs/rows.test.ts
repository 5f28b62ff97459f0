import assert from "node:assert/strict";
import { test } from "node:test";
import { viewOf } from "../../src/lib/jobs/view.ts";
import type { Job } from "../../src/lib/types.ts";
import { columnsOf, deedOf, knownTo, matches, picked, sparkline, windowed } from "../../src/lib/jobs/rows.ts";

test("of five thousand rows those in sight are drawn", () => {
  assert.deepEqual(windowed(5000, 36, 0, 720), { from: 0, to: 40 });
  assert.deepEqual(windowed(5000, 36, 36_000, 720), { from: 980, to: 1040 });
  assert.deepEqual(windowed(10, 36, -500, 720), { from: 0, to: 10 });
  assert.deepEqual(windowed(10, 36, 90_000, 720), { from: 10, to: 10 });
  assert.deepEqual(windowed(0, 36, 0, 720), { from: 0, to: 0 });
});

test("shift picks all rows between two clicks, and takes them back", () => {
  const ids = ["a", "b", "c", "d"];
  assert.deepEqual([...picked(new Set(), ids, "b", null, false)], ["b"]);
  assert.deepEqual([...picked(new Set(["b"]), ids, "d", "b", true)].sort(), ["b", "c", "d"]);
  assert.deepEqual([...picked(new Set(["a", "b", "c"]), ids, "a", "c", true)], []);
  assert.deepEqual([...picked(new Set(), ids, "c", "gone", true)], ["c"]);
});

test("keys mean nothing while somebody types", () => {
  assert.equal(deedOf("j", false, false), "down");
  assert.equal(deedOf("j", true, false), undefined);
  assert.equal(deedOf("c", false, true), undefined);
  assert.equal(deedOf("q", false, false), undefined);
});

test("a curve fills its box, also a flat one", () => {
  assert.equal(sparkline([0, 1, 0.5], 10, 4), "0.0,4.0 5.0,0.0 10.0,2.0");
  assert.equal(sparkline([2, 2], 10, 4), "0.0,4.0 10.0,4.0");
});

test("columns that are kept are shown in their order", () => {
  assert.deepEqual(columnsOf(null, ["State", "Curve", "Model", "Owner"], 1700), ["State", "Curve", "Model", "Owner"]);
  assert.deepEqual(columnsOf(null, ["State", "Curve", "Model", "Owner"], 1280), ["State", "Curve"]);
  assert.deepEqual(columnsOf(null, ["State", "Curve", "Model", "Owner"], 900), ["State"]);
  assert.deepEqual(columnsOf(null, ["State", "Curve", "Model", "Owner"], 375), ["State", "Curve"]);
  assert.deepEqual(columnsOf("b,gone", ["a", "b"], 100), ["b"]);
  assert.deepEqual(columnsOf(null, ["State", "Kind", "Notes", "Updated", "Finished"], 4000), ["State"]);
  assert.deepEqual(columnsOf("Notes", ["State", "Notes"], 375), ["Notes"]);
});

test("a job matches if it has all words, wherever they are", () => {
  const job = { id: "j-1", name: "Long run", kind: "rl", model: "m/tiny", project: "Maths", key: "k", tags: ["best"] } as unknown as Job;
  for (const text of ["", "long", "RUN maths", "best tiny j-1"]) assert.ok(matches(job, text), text);
  for (const text of ["longrun", "long eval"]) assert.ok(!matches(job, text), text);
});

test("jobs that were listed are shown until the server answers, unless only it can tell which", () => {
  const job = (id: string, state: string): Job => ({ id, state, name: id, kind: "rl", model: "", project: "", key: "", tags: [] }) as unknown as Job;
  const seen = [job("one", "running"), job("two", "failed"), job("onto", "failed")];
  const known = (query: string): string[] => knownTo(viewOf(query), seen).map(({ id }) => id);
  assert.deepEqual(known("search=on"), ["one", "onto"]);
  assert.deepEqual(known("search=on&state=failed"), ["onto"]);
  for (const query of ["search=on&tag=a", "search=on&sort=name"]) assert.deepEqual(known(query), []);
});
