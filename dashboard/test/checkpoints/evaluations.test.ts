// The table of evaluations over checkpoints.

import assert from "node:assert/strict";
import { test } from "node:test";
import { evaluationTable } from "../../src/lib/checkpoints/evaluations.ts";
import type { Evaluation, Point } from "../../src/lib/types.ts";

function point(step: number, values: Record<string, number>, source = "validation"): Point {
  return { step, time: step, source, incarnation: "a", seq: step, values: { "val/episodes": 4, ...values } } as Point;
}

function evaluation(step: number, values: Record<string, number>, policy = ""): Evaluation {
  return { job: `j-${step}`, name: "look", policy, step, state: "succeeded", environment: "math", setting: "math; greedy", values, categories: [], during_training: false };
}

test("a step is a row, the newest first, with the evaluations of the job and those of eval jobs", () => {
  const points = [
    point(10, { "val/reward/mean": 0.1, "val/reward/low": 0, "val/reward/high": 0.2, "val/format": 1 }),
    point(20, { "val/reward/mean": 0.3, "val/turns/mean": 1, "val/pass/1": 0.25 }),
    point(10, { "val/reward/mean": 0.2 }), // again, after a restart
  ];
  const table = evaluationTable([evaluation(10, { "val/exact": 0.5 }), evaluation(30, {})], points, "", "metrics");
  assert.deepEqual(table.columns, ["reward/mean", "exact", "pass/1"]);
  assert.deepEqual(
    table.rows.map((row) => [row.step, row.job, row.cells.map((cell) => cell?.value)]),
    [
      [20, "", [0.3, undefined, 0.25]],
      [10, "", [0.2, undefined, undefined]],
      [10, "j-10", [undefined, 0.5, undefined]],
    ],
  );
  assert.deepEqual(table.rows.map((row) => row.setting), ["", "", "math; greedy"]);
  assert.equal(table.hasCategories, false);
});

test("categories are columns of solved shares with their intervals", () => {
  const values = { "val/task/level 10/pass/1": 0.5, "val/task/level 2/pass/1": 1, "val/task/level 2/pass/1/low": 0.6, "val/task/level 2/pass/1/high": 1 };
  const table = evaluationTable([evaluation(3, values)], [], "", "categories");
  assert.deepEqual(table.columns, ["level 2", "level 10"]);
  assert.deepEqual(table.rows[0]!.cells[0]!.interval, [0.6, 1]);
  assert.equal(table.hasCategories, true);
});

test("a policy has its own evaluations", () => {
  const points = [point(1, { "alice/val/episodes": 4, "alice/val/exact": 1 }, "validation~alice"), point(1, { "bob/val/exact": 0 }, "validation~bob")];
  const table = evaluationTable([evaluation(2, { "val/exact": 0.5 }, "bob")], points, "alice", "metrics");
  assert.deepEqual(table.rows.map((row) => [row.step, row.cells[0]!.value]), [[1, 1]]);
});
