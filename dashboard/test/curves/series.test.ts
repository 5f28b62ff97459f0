import assert from "node:assert/strict";
import { test } from "node:test";
import { Joined } from "../../src/lib/live/join.ts";
import { clamped, aligned, metric, shareOf, smoothed, together } from "../../src/lib/curves/series.ts";
import { settings } from "../../src/lib/spec.ts";

function joined(...points: [string, number, number, Record<string, number>][]): Joined {
  const found = new Joined();
  points.forEach(([source, time, step, values], seq) => found.add({ source, incarnation: "a", seq, time, step, values }));
  return found;
}

test("a step that was trained again replaces the old one and those after it", () => {
  const found = joined(["trainer", 1, 1, { x: 1 }], ["trainer", 2, 2, { x: 2 }], ["trainer", 3, 3, { x: 3 }], ["trainer", 4, 2, { x: 9 }]);
  assert.deepEqual(metric(found, "x", "step"), { label: "x", x: [1, 2], y: [1, 9] });
  assert.deepEqual(metric(found, "x", "time").x, [0, 1, 2, 3]);
});

test("workers' rates are summed by the second, at the step that the trainer had reached", () => {
  const found = joined(
    ["trainer", 100, 1, { step_seconds: 1 }],
    ["trainer", 102, 2, { step_seconds: 1 }],
    ["rollout-0", 100.1, 0, { "rollout/tokens_per_s": 10 }],
    ["rollout-1", 100.7, 0, { "rollout/tokens_per_s": 5 }],
    ["rollout-0", 102.2, 0, { "rollout/tokens_per_s": 8 }],
  );
  assert.deepEqual(together(found, "rollout/tokens_per_s", "time").y, [15, 8]);
  assert.deepEqual(together(found, "rollout/tokens_per_s", "step").x, [1, 2]);
  assert.deepEqual(together(found, "rollout/tokens_per_s", "time", "mean").y, [7.5, 8]);
});

test("a share of what workers count up is of all of them, and no worker erases another", () => {
  const said = (env: number, engine: number) => ({ env, engine });
  const found = joined(
    ["trainer", 100, 1, { step_seconds: 1 }],
    ["trainer", 102, 2, { step_seconds: 1 }],
    ["rollout-0", 100.1, 0, said(1, 1)],
    ["rollout-1", 100.7, 0, said(0, 2)],
    ["rollout-0", 102.2, 0, said(2, 1)],
    ["rollout-1", 102.3, 0, said(0, 5)],
    ["rollout-1", 104.3, 0, said(1, 5)],
  );
  found.add({ source: "rollout-1", incarnation: "b", seq: 0, time: 106, step: 0, values: said(1, 3) }); // counts anew
  assert.deepEqual(shareOf(found, "env", ["env", "engine"], "time"), { label: "env", x: [0.5, 2.5, 4.5, 6.5], y: [0.25, 0.25, 1, 0.25] });
  assert.deepEqual(shareOf(found, "env", ["env", "engine"], "step").x, [1, 2, 2, 2]);
});

test("a moving average begins without bias", () => {
  assert.deepEqual(smoothed([4, 4, 4], 0.9).map((y) => Number(y.toFixed(9))), [4, 4, 4]);
  assert.deepEqual(smoothed([1, 2], 0), [1, 2]);
});

test("lines over different x stand in one table, with nothing where they have nothing", () => {
  const table = aligned([
    { x: [1, 3], ys: [[10, 30]] },
    { x: [2, 3], ys: [[20, 31]] },
  ]);
  assert.deepEqual(table, [[1, 2, 3], [10, null, 30], [null, 20, 31]]);
});

test("settings differ from the defaults of the server's schema, nested ones by their own", () => {
  const schemas = {
    JobSpec: { properties: { name: {}, train: { $ref: "#/x/Train", default: { lr: 1, steps: 0 } }, lora: { anyOf: [{ $ref: "#/x/Lora" }], default: null } } },
    Train: { properties: { lr: { default: 1 }, steps: { default: 0 } } },
    Lora: { properties: { rank: { default: 8 } } },
  };
  const found = settings({ name: "a", train: { lr: 1, steps: 5 }, lora: { rank: 8 } }, schemas);
  assert.deepEqual(found.map((one) => [one.path, one.differs]), [
    ["name", true],
    ["train.lr", false],
    ["train.steps", true],
    ["lora.rank", false],
  ]);
});

test("a band on a logarithmic axis ends at its smallest value above 0", () => {
  assert.deepEqual(clamped([[3, 2], [-1, 0.5]]), [[3, 2], [0.5, 0.5]]);
  assert.deepEqual(clamped([]), []);
});
