import assert from "node:assert/strict";
import { test } from "node:test";
import { directionOf, winners } from "../../src/lib/compare/direction.ts";

test("more reward is better, less loss and less time", () => {
  const rising = ["reward/mean", "val/reward/mean", "val/reward/low", "reward/env/gsm8k", "exact", "val/exact/high", "val/pass/8", "val/winrate/random", "accuracy", "rewards/accuracy", "val/rating", "trainer/tokens_per_s"];
  const falling = ["loss", "val/loss", "models/m/loss", "teacher/kl", "mismatch/mean", "swap/mismatch", "swap/pause_s", "step_seconds", "val/seconds", "val/failed", "trainer/wait_share"];
  assert.deepEqual(rising.map(directionOf), rising.map(() => "rises"));
  assert.deepEqual(falling.map(directionOf), falling.map(() => "falls"));
});

test("of many metrics nobody can say which way is better", () => {
  const names = ["entropy", "grad_norm", "loss/policy", "loss/kl", "reward/std", "reward/seat/white", "val/reward/std", "response_length/mean", "turns/mean", "lr", "val/rating/error", "val/draws", "ending/done", "my_score", "tokens"];
  assert.deepEqual(names.map(directionOf), names.map(() => null));
});

test("the best are marked where there is a difference and a direction", () => {
  assert.deepEqual(winners([0.1, 0.9, null], "rises"), [1]);
  assert.deepEqual(winners([0.1, 0.9, null], "falls"), [0]);
  assert.deepEqual(winners([0.9, 0.1, 0.9], "rises"), [0, 2]);
  assert.deepEqual(winners([0.9, 0.1], null), []);
  assert.deepEqual(winners([0.5, 0.5], "rises"), []);
  assert.deepEqual(winners([0.5, null], "rises"), []);
  assert.deepEqual(winners([], "rises"), []);
});
