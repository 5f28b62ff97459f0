import assert from "node:assert/strict";
import { test } from "node:test";
import { FEW, folded, large } from "../../src/lib/timeline/fold.ts";
import { busyShare, isOf, Lanes, stepped, type Segment } from "../../src/lib/timeline/lanes.ts";

const segment = (start: number, end: number, kind: string, lane: string, level = 1): Segment => ({ lane, kind, start, end, version: "", level });
const near = (a: number, b: number): void => assert.ok(Math.abs(a - b) < 1e-6, `${a} is not ${b}`);

/** Env worker n plays from second n to n + 2, two sessions at a time; a rollout worker waits for them. */
function played(workers: number): Lanes {
  const lanes = new Lanes();
  for (let n = 0; n < workers; n += 1) {
    const segments = [segment(n, n + 0.5, "open", "env"), segment(n, n + 2, "turn", "env", 2)];
    lanes.add({ worker: `env-${n}`, incarnation: "a", seq: 0, segments, left_out: 0 });
  }
  const waits = [segment(0, 9, "rollout", "env", 3), segment(0, 9, "rollout", "generation")];
  lanes.add({ worker: "rollout-0", incarnation: "a", seq: 0, segments: waits, left_out: 0 });
  lanes.add({ worker: "reference-0", incarnation: "a", seq: 0, segments: [segment(1, 2, "score", "reference")], left_out: 0 });
  return lanes;
}

test("env workers stand below who waits for them, by their numbers, and a few each for itself", () => {
  const names = (lanes: Lanes): string[] => lanes.rows.map((row) => `${row.lane} ${row.worker}`);
  const rest = ["generation rollout-0", "env rollout-0"];
  assert.deepEqual(names(played(2)), [...rest, "env env-0", "env env-1", "reference reference-0"]);
  const many = played(12).rows.filter((row) => row.group === "play");
  assert.deepEqual([many[2]!.worker, many.at(-1)!.worker], ["env-2", "env-11"]);
  const few = played(FEW);
  assert.deepEqual(folded(few.rows, new Set(), 0, 10), few.rows);
  assert.deepEqual(large(few.rows), new Set());
});

test("many are one row, with what all do at a time and the mean of their shares, until it is opened", () => {
  const lanes = played(8);
  const rows = folded(lanes.rows, new Set(), 0, 10);
  assert.deepEqual(rows.map((row) => [row.lane, row.worker]), [
    ["generation", "rollout-0"],
    ["env", "rollout-0"],
    ["env", "8 workers"],
    ["reference", "reference-0"],
  ]);
  const all = rows[2]!;
  near(busyShare(all, 0, 10)!, 0.2);
  assert.ok(isOf(all, "env-7") && !isOf(all, "rollout-0"));
  const turns = all.segments.filter((one) => one.kind === "turn");
  near(turns.reduce((sum, one) => sum + one.level * (one.end - one.start), 0), 8 * 2 * 2);
  const at = (time: number) => turns.find((one) => one.start <= time && time < one.end)!.level;
  near(at(0.51), 2); // of env-0 alone
  near(at(4.51), 4);
  near(at(8.51), 2);
  assert.ok(!turns.some((one) => one.end > 9.01)); // nobody played then
  near(all.segments.filter((one) => one.kind === "open").reduce((sum, one) => sum + one.end - one.start, 0), 8 * 0.5);
  assert.deepEqual(large(lanes.rows), new Set(["play"]));
  assert.deepEqual(folded(lanes.rows, new Set(["play"]), 0, 10), lanes.rows);
});

test("a folded row ends where the window does, and its segments keep their places while the window moves", () => {
  const lanes = played(8);
  const [one, next] = [4.5, 4.52].map((to) => folded(lanes.rows, new Set(), to - 3, to).find((row) => row.of)!);
  near(Math.max(...one!.segments.map((segment) => segment.end)), 4.5);
  const starts = new Set(one!.segments.map((segment) => segment.start));
  const kept = next!.segments.filter((segment) => segment.end < 4.49 && segment.start >= 1.53);
  assert.ok(kept.length > 100 && kept.every((segment) => starts.has(segment.start)));
  const last = next!.segments.filter((segment) => segment.kind === "turn").at(-1)!;
  assert.ok(last.end === 4.52 && last.end - last.start < 0.014);
  near(last.level, 4); // of the part of a column that the window shows
});

test("a segment of a folded row stays chosen though the row is made anew", () => {
  const lanes = played(8);
  const shown = () => folded(lanes.rows, new Set(), 0, 10);
  let picked = stepped(shown(), 0, 10, null, "ArrowDown");
  for (let i = 0; i < 2; i += 1) picked = stepped(shown(), 0, 10, picked, "ArrowDown");
  assert.equal(picked?.row.worker, "8 workers");
  const before = picked!.segment.start;
  picked = stepped(shown(), 0, 10, picked, "ArrowLeft");
  picked = stepped(shown(), 0, 10, picked, "ArrowLeft");
  assert.ok(picked!.segment.start < before);
  assert.equal(stepped(shown(), 0, 10, picked, "ArrowDown")?.row.lane, "reference");
});
