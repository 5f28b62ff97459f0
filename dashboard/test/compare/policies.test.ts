// Metrics of jobs with several policies in a comparison.

import assert from "node:assert/strict";
import { test } from "node:test";
import { directionOf } from "../../src/lib/compare/direction.ts";
import { bareName, firstMetrics, policiesIn } from "../../src/lib/compare/policies.ts";

const NAMES = ["grad_norm", "guesser/loss", "guesser/reward/mean", "speaker/entropy", "speaker/loss", "speaker/reward/mean", "swap/mismatch"];
const POLICIES = ["speaker", "guesser"];

test("the charts at first are those of all policies", () => {
  assert.deepEqual(firstMetrics(NAMES, POLICIES), ["guesser/reward/mean", "speaker/reward/mean", "guesser/loss", "speaker/loss", "speaker/entropy"]);
  assert.deepEqual(firstMetrics(["loss", "val/reward/mean", "reward/mean", "exact", "entropy"], []), ["reward/mean", "val/reward/mean", "exact", "loss"]);
  const many = Array.from({ length: 12 }, (_, at) => `p${at}`);
  assert.equal(firstMetrics(many.map((one) => `${one}/loss`), many).length, 8);
  assert.deepEqual(firstMetrics(NAMES, []), []);
});

test("a policy's metric is better in the direction of the metric", () => {
  assert.deepEqual(["speaker/reward/mean", "guesser/loss", "speaker/entropy", "swap/mismatch"].map((name) => directionOf(bareName(name, POLICIES))), ["rises", "falls", null, "falls"]);
  assert.equal(bareName("other/loss", POLICIES), "other/loss");
});

test("policies are those of the spec", () => {
  assert.deepEqual(policiesIn({ policies: { speaker: {}, guesser: {} } }), POLICIES);
  assert.deepEqual([policiesIn({ policies: null }), policiesIn({}), policiesIn(null)], [[], [], []]);
});
