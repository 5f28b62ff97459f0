import assert from "node:assert/strict";
import { test } from "node:test";
import { rewinds } from "../../src/lib/curves/rewinds.ts";
import type { Event } from "../../src/lib/types.ts";

const EVENTS: Event[] = [
  { id: "1-0", event: "checkpoint", time: 100, step: 40 },
  { id: "2-0", event: "rewound", time: 160, from: 61, to: 40, alarm: "reward_cliff", rewind: 1, removed: [50, 60] },
  { id: "3-0", event: "not_rewound", time: 170, step: 61, alarm: "non_finite", problem: "there is no checkpoint" },
  { id: "4-0", event: "rewound", time: 190, from: 55, to: 40, alarm: "non_finite", rewind: 2, removed: [50] },
];

test("a rewind is marked by step where the job continued, with the reason", () => {
  assert.deepEqual(rewinds(EVENTS, "step", 90), [
    { x: 40, text: "from step 61 to 40 (reward_cliff)" },
    { x: 40, text: "from step 55 to 40 (non_finite)" },
  ]);
});

test("by time it is marked where the job went back, and not before the first point is known", () => {
  assert.deepEqual(rewinds(EVENTS, "time", 90).map(({ x }) => x), [70, 100]);
  assert.deepEqual(rewinds(EVENTS, "time", Infinity), []);
});

test("an event without its steps marks nothing", () => {
  assert.deepEqual(rewinds([{ id: "1-0", event: "rewound", time: 1, to: "40", from: null }], "step", 0), []);
});
