import assert from "node:assert/strict";
import { test } from "node:test";
import { resultRows } from "../../src/lib/checkpoints/results.ts";

test("an evaluation is a row a metric, with its interval, rewards and pass@k first", () => {
  const rows = resultRows({
    "val/episodes": 64,
    "val/pass/16": 1,
    "val/pass/2": 0.97,
    "val/reward/mean": 0.5,
    "val/reward/low": 0.4,
    "val/reward/high": 0.6,
  });
  assert.deepEqual(
    rows.map((row) => row.name),
    ["pass/2", "pass/16", "reward/mean", "episodes"],
  );
  assert.deepEqual(rows[2], { name: "reward/mean", value: 0.5, interval: [0.4, 0.6] });
  assert.equal(rows[0]!.interval, null);
});
