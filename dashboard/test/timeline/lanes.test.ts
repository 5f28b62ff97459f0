import assert from "node:assert/strict";
import { test } from "node:test";
import { busyShare, Lanes, lookBack, nearest, stepped, within, type Segment } from "../../src/lib/timeline/lanes.ts";

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
  const row = { worker: "w", lane: "training", group: "training", segments: [segment(0, 4), segment(2, 5), segment(5, 9, "wait"), segment(9, 12)] };
  assert.equal(busyShare(row, 0, 10), 0.6);
  assert.equal(busyShare(row, 5, 9), 0);
  assert.deepEqual(within(row, 4.5, 5.5).map((one) => one.kind), ["step", "wait"]);
});

test("a rollout worker that waits for tickets, exams, weights or the store is not busy", () => {
  const lanes = new Lanes();
  const waits = ["weights", "tickets", "exams", "store"].map((kind, n) => segment(n, n + 1, kind, "generation"));
  lanes.add(part(0, ...waits, segment(4, 5, "rollout", "generation")));
  assert.equal(busyShare(lanes.rows[0]!, 0, 5), 0.2);
});

test("short gaps that a segment glues over are not counted as busy", () => {
  const row = { worker: "w", lane: "env", group: "play", segments: [{ ...segment(0, 4, "turn", "env"), level: 0.25 }, { ...segment(6, 8, "turn", "env"), level: 7 }] };
  assert.equal(busyShare(row, 0, 10), 0.3);
});

test("a message that is missing is a hole between its neighbours, and no idle time", () => {
  const lanes = new Lanes();
  lanes.add(part(4, segment(10, 11), segment(10.2, 11.2, "load", "swap")));
  lanes.add(part(6, segment(9, 13.5, "transfer", "swap"), segment(13, 14)));
  lanes.add({ ...part(9, segment(10, 20)), worker: "rollout-0" }); // nothing is known before it, so nothing is missing
  lanes.add({ ...part(0, segment(30, 31)), incarnation: "b" }); // its count begins anew
  assert.deepEqual(lanes.gaps(), [{ source: "trainer-0", incarnation: "a", from: 5, to: 5 }]);
  assert.deepEqual(lanes.holes(), [{ worker: "trainer-0", from: 11.2, to: 13 }]);
  const training = lanes.rows.find((row) => row.worker === "trainer-0" && row.lane === "training");
  assert.equal(busyShare(training!, 10, 14, lanes.holes()), 2 / (4 - (13 - 11.2)));
  assert.equal(busyShare(training!, 11.5, 12.5, lanes.holes()), null);
  assert.equal(busyShare({ ...training!, worker: "trainer-1" }, 10, 14, lanes.holes()), 0.5);
  lanes.giveUp(lanes.gaps()[0]!);
  assert.deepEqual([lanes.gaps().length, lanes.missing, lanes.holes().length], [0, 1, 1]);
});

test("a missing message that comes after all leaves no hole", () => {
  const lanes = new Lanes();
  for (const seq of [0, 1, 4]) lanes.add(part(seq, segment(seq, seq + 0.5)));
  assert.deepEqual(lanes.holes(), [{ worker: "trainer-0", from: 1.5, to: 4 }]);
  lanes.add(part(3, segment(3, 3.5)));
  assert.deepEqual(lanes.holes(), [{ worker: "trainer-0", from: 1.5, to: 3 }]);
  lanes.add(part(2, segment(2, 2.5)));
  assert.deepEqual(lanes.holes(), []);
});

test("arrow keys choose among what the window shows", () => {
  const rows = [
    { worker: "t", lane: "training", group: "training", segments: [segment(0, 1), segment(2, 3), segment(4, 5), segment(90, 91)] },
    { worker: "t", lane: "swap", group: "swap", segments: [segment(95, 96)] },
    { worker: "r", lane: "generation", group: "generation", segments: [segment(0, 2.4), segment(2.45, 5)] },
  ];
  const [training, , generation] = rows;
  let picked = stepped(rows, 0, 10, null, "ArrowLeft");
  assert.deepEqual(picked, { row: training, segment: training!.segments[2] });
  for (const [key, row, at] of [
    ["ArrowLeft", training, 1],
    ["ArrowDown", generation, 1],
    ["ArrowDown", generation, 1],
    ["ArrowLeft", generation, 0],
    ["ArrowLeft", generation, 0],
    ["ArrowUp", training, 0],
    ["ArrowRight", training, 1],
    ["ArrowRight", training, 2],
    ["ArrowRight", training, 2],
  ] as const) {
    picked = stepped(rows, 0, 10, picked, key);
    assert.ok(picked?.row === row && picked?.segment === row!.segments[at], `${key} leads to ${row!.lane} ${at}`);
  }
  assert.equal(stepped(rows, 90, 92, picked, "ArrowLeft")?.segment, training!.segments[3]); // it has left the window
  assert.equal(stepped(rows, 200, 210, picked, "ArrowLeft"), null);
  assert.equal(nearest(training!, 1.2, 0.3), training!.segments[0]);
  assert.equal(nearest(training!, 1.5, 0.3), null);
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
