import assert from "node:assert/strict";
import { test } from "node:test";
import { lineageLinks, metricRows, settingsOf } from "../../src/lib/checkpoints/registry.ts";
import type { RegisteredCheckpoint } from "../../src/lib/types.ts";

/** A checkpoint with evaluations, of which the server has chosen these for each setting. */
function evaluated(compared: Record<string, number>, ...values: Record<string, number>[]): RegisteredCheckpoint {
  return { evaluations: values.map((one) => ({ values: one })), compared } as unknown as RegisteredCheckpoint;
}

test("checkpoints are compared by metric, the best marked, by the evaluation that the server has chosen", () => {
  const first = evaluated({ maths: 0 }, { "val/exact": 0.5, "val/exact/low": 0.4, "val/exact/high": 0.6, "val/loss": 2, "val/episodes": 10 });
  const second = evaluated({ maths: 1 }, { "val/exact": 0.1 }, { "val/exact": 0.7, "val/loss": 3, "val/episodes": 20 });
  const third = evaluated({});
  const rows = Object.fromEntries(metricRows([first, second, third], "maths").map((row) => [row.name, row]));
  assert.deepEqual(rows["exact"]!.cells, [{ value: 0.5, interval: [0.4, 0.6] }, { value: 0.7, interval: null }, null]);
  assert.deepEqual(rows["exact"]!.best, [1]);
  assert.deepEqual(rows["loss"]!.best, [0]);
  assert.deepEqual(rows["episodes"]!.best, []);
});

test("equal values are not marked, and equal best ones are marked together", () => {
  const of = (...values: number[]): number[] => metricRows(values.map((value) => evaluated({ a: 0 }, { "val/exact": value })), "a")[0]!.best;
  assert.deepEqual(of(0.5, 0.5), []);
  assert.deepEqual(of(0.5, 0.25, 0.5), [0, 2]);
  assert.deepEqual(of(0.5), []);
});

test("evaluations in different settings share no row", () => {
  const [train, test] = ["gsm8k split=train; greedy", "gsm8k split=test; greedy"] as const;
  const first = evaluated({ [train]: 0 }, { "val/exact": 0.9 });
  const second = evaluated({ [test]: 0 }, { "val/exact": 0.5 });
  const third = evaluated({ [train]: 1, [test]: 0 }, { "val/exact": 0.4 }, { "val/exact": 0.95 });
  assert.deepEqual(settingsOf([first, third]), [train, test], "that of most checkpoints first");
  assert.deepEqual(settingsOf([first, second, third]), [test, train]);
  assert.deepEqual(metricRows([first, second, third], train)[0]!.cells.map((cell) => cell?.value), [0.9, undefined, 0.95]);
  assert.deepEqual(metricRows([first, second, third], test)[0]!.best, [1]);
});

test("a lineage begins with the base model, and each continuation leads to its job", () => {
  assert.deepEqual(lineageLinks(["some/model", "j-a@5", "j-b~red@7"]), [
    { text: "some/model", to: null },
    { text: "j-a@5", to: "/jobs/j-a/checkpoints" },
    { text: "j-b~red@7", to: "/jobs/j-b/checkpoints" },
  ]);
});
