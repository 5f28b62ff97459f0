import assert from "node:assert/strict";
import { test } from "node:test";
import { environmentsOf, lineageLinks, metricRows } from "../../src/lib/checkpoints/registry.ts";
import type { RegisteredCheckpoint } from "../../src/lib/types.ts";

function evaluated(...evaluations: [string, Record<string, number>][]): RegisteredCheckpoint {
  const list = evaluations.map(([environment, values]) => ({ job: "j", name: "", policy: "", step: 1, state: "succeeded", environment, values, during_training: false }));
  return { evaluations: list } as unknown as RegisteredCheckpoint;
}

test("checkpoints are compared by metric, the best marked, the newest evaluation counting", () => {
  const first = evaluated(["maths", { "val/exact": 0.5, "val/exact/low": 0.4, "val/exact/high": 0.6, "val/loss": 2, "val/episodes": 10 }]);
  const second = evaluated(["maths", { "val/exact": 0.7, "val/loss": 3, "val/episodes": 20 }], ["maths", { "val/exact": 0.1 }]);
  const third = evaluated();
  const rows = Object.fromEntries(metricRows([first, second, third]).map((row) => [row.name, row]));
  assert.deepEqual(rows["exact"]!.cells, [{ value: 0.5, interval: [0.4, 0.6] }, { value: 0.7, interval: null }, null]);
  assert.deepEqual(rows["exact"]!.best, [1]);
  assert.deepEqual(rows["loss"]!.best, [0]);
  assert.deepEqual(rows["episodes"]!.best, []);
});

test("equal values are not marked, and equal best ones are marked together", () => {
  const of = (...values: number[]): number[] => metricRows(values.map((value) => evaluated(["a", { "val/exact": value }])))[0]!.best;
  assert.deepEqual(of(0.5, 0.5), []);
  assert.deepEqual(of(0.5, 0.25, 0.5), [0, 2]);
  assert.deepEqual(of(0.5), []);
});

test("a comparison can keep to one environment", () => {
  const both = evaluated(["a", { "val/exact": 0.5 }], ["b", { "val/exact": 0.25 }]);
  assert.deepEqual(environmentsOf([both]), ["a", "b"]);
  assert.equal(metricRows([both], "b")[0]!.cells[0]!.value, 0.25);
  const onRows = evaluated(["a", { "val/exact": 0.5 }], ["", { "val/loss": 2 }]);
  assert.deepEqual(metricRows([onRows], "").map((row) => row.name), ["loss"], "rows of [data] are no environment");
});

test("a lineage begins with the base model, and each continuation leads to its job", () => {
  assert.deepEqual(lineageLinks(["some/model", "j-a@5", "j-b~red@7"]), [
    { text: "some/model", to: null },
    { text: "j-a@5", to: "/jobs/j-a/checkpoints" },
    { text: "j-b~red@7", to: "/jobs/j-b/checkpoints" },
  ]);
});
