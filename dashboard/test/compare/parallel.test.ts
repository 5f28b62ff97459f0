// Runs as lines across axes.

import { strict as assert } from "node:assert";
import { test } from "node:test";
import type { Run } from "../../src/lib/compare/compare.ts";
import { parallel } from "../../src/lib/compare/parallel.ts";
import type { Json } from "../../src/lib/types.ts";

function run(id: string, spec: Json, last: number | null): Run {
  const points = last === null ? [] : [{ step: 1, time: 1, values: { loss: last } }];
  return { id, name: id, spec, points } as unknown as Run;
}

const RUNS = [
  run("a", { train: { lr: 1e-5 }, algorithm: { name: "grpo" }, rollout: { max_tokens: 10 } }, 4),
  run("b", { train: { lr: 1e-4 }, algorithm: { name: "ppo" }, rollout: { max_tokens: 15 } }, 1),
  run("c", { train: { lr: 1e-3 }, algorithm: { name: "ppo" }, rollout: { max_tokens: 20 } }, null),
];

test("numbers are placed between their ends, wide ones by orders of magnitude, words by name", () => {
  const { axes, strands } = parallel(RUNS, "loss", true);
  assert.deepEqual(axes.map((axis) => axis.name), ["algorithm.name", "rollout.max_tokens", "train.lr", "loss"]);
  assert.deepEqual(axes[0]!.marks, [{ at: 0, text: "grpo" }, { at: 1, text: "ppo" }]);
  assert.deepEqual(strands[0]!.at.slice(0, 2), [0, 0]);
  assert.deepEqual(strands[1]!.at.slice(0, 2), [1, 0.5]);
  assert.ok(Math.abs(strands[1]!.at[2]! - 0.5) < 1e-9, "1e-4 is halfway between 1e-5 and 1e-3");
  assert.deepEqual(strands.map((one) => one.at[3]), [1, 0, null]);
});

test("the best of a metric that should fall is the lowest, and a run without it has no rank", () => {
  assert.deepEqual(parallel(RUNS, "loss", true).strands.map((one) => one.rank), [0, 1, null]);
  assert.deepEqual(parallel(RUNS, "loss", false).strands.map((one) => one.rank), [1, 0, null]);
});
