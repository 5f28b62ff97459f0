import assert from "node:assert/strict";
import { test } from "node:test";
import { mainResult, resultRows } from "../../src/lib/checkpoints/results.ts";

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

test("games stand for an evaluation by how often they were won", () => {
  const games = { "val/pass/1": 0.25, "val/winrate/random": 0.754, "val/winrate/random/low": 0.6, "val/winrate/random/high": 0.9, "val/winrate/b": 0 };
  assert.equal(mainResult(games), "won 0% against b, 75% against random");
  assert.equal(mainResult({ "val/winrate": 0.5, "val/winrate/low": 0.4, "val/winrate/high": 0.6 }), "won 50%");
  assert.equal(mainResult({ "val/pass/1": 0.25 }), "pass/1 0.25");
});
