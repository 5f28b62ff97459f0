import assert from "node:assert/strict";
import { test } from "node:test";
import { busyShare, Lanes, lookBack, within, type Segment } from "../src/lib/lanes.ts";

const segment = (start: number, end: number, kind = "step", lane = "training"): Segment => ({
  lane,
  kind,
  start,
  end,
  version: "1.1",
  level: 1,
});
const part = (seq: number, ...segments: Segment[]) => ({ worker: "trainer-0", incarnation: "a", seq, segments, left_out: 0 });

test("a part counts once, and its segments lie in the order of their start", () => {
  const lanes = new Lanes();
  assert.equal(lanes.add(part(1, segment(11, 12))), true);
  assert.equal(lanes.add(part(0, segment(10, 11), segment(10.5, 11, "load", "swap"))), true);
  assert.equal(lanes.add(part(1, segment(11, 12))), false);
  assert.deepEqual(lanes.rows.map((row) => [row.lane, row.segments.map((one) => one.start)]), [
    ["training", [10, 11]],
    ["swap", [10.5]],
  ]);
  assert.equal(lanes.end, 12);
});

test("a share is of the window, counts what overlaps once, and waiting is no work", () => {
  const row = { worker: "w", lane: "training", segments: [segment(0, 4), segment(2, 5), segment(5, 9, "wait"), segment(9, 12)] };
  assert.equal(busyShare(row, 0, 10), 0.6);
  assert.equal(busyShare(row, 5, 9), 0);
  assert.deepEqual(within(row, 4.5, 5.5).map((one) => one.kind), ["step", "wait"]);
});

test("what is older than an hour is let go", () => {
  const lanes = new Lanes();
  lanes.add(part(0, segment(0, 1), segment(5000, 5001)));
  lanes.forget(5001);
  assert.deepEqual(lanes.rows[0]!.segments.map((one) => one.start), [5000]);
});

test("of a job that is over its last hour is asked for, as far back as the server goes", () => {
  assert.equal(lookBack({ state: "running", finished: null }, 50_000), 3600);
  assert.equal(lookBack({ state: "succeeded", finished: 9_999.5 }, 50_000), 40_001 + 3600);
  assert.equal(lookBack({ state: "failed", finished: 60_000 }, 50_000), 3600);
  assert.equal(lookBack({ state: "cancelled", finished: 0 }, 1e9), 604_800);
});
