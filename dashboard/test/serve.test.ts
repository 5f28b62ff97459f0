// Specs made of jobs, and what their checkpoints are.

import assert from "node:assert/strict";
import { test } from "node:test";
import { cloneSpec, inferenceSpec, savesAdapters } from "../src/lib/serve.ts";
import type { JobDetail } from "../src/lib/types.ts";

test("a job with lora saves adapters, any other whole models", () => {
  const of = (model: object): boolean => savesAdapters({ spec: { model } } as unknown as JobDetail);
  assert.equal(of({ base: "m", lora: { rank: 8 } }), true);
  assert.equal(of({ base: "m", lora: null }), false);
  assert.equal(of({ base: "m" }), false);
  assert.equal(savesAdapters({ spec: null } as unknown as JobDetail), false);
});

test("an endpoint of a model that is divided among GPUs has as many", () => {
  const of = (resources?: object): unknown => {
    const job = { id: "j-1", name: "x", spec: { model: { base: "m" }, resources } } as unknown as JobDetail;
    return (inferenceSpec(job, 3) as Record<string, unknown>)["resources"];
  };
  assert.deepEqual(of({ rollout_gpus: 4, trainer_gpus: 1 }), { rollout_gpus: 4 });
  assert.equal(of({ rollout_gpus: 1 }), undefined);
  assert.equal(of(), undefined);
});

test("the clone of a sweep's job has the job's tags, but not the sweep's", () => {
  const of = (spec: object, step = "", name = "x #3"): unknown => cloneSpec({ id: "j-1", name, spec } as unknown as JobDetail, step);
  const train = { lr: 1e-4 };
  assert.deepEqual(of({ name: "x #3", tags: ["maths", "s-a1b2c3d4e5"], train }), { name: "x #3-again", tags: ["maths"], train });
  assert.deepEqual(of({ tags: ["s-a1b2c3d4e5"] }, "5"), { name: "x #3-again", start: { from: "j-1@5" } });
  assert.deepEqual(of({ tags: ["s-validation", "s-a1b2c3d4e5", "late"] }, "", "x #12 lr=1"), { name: "x #12 lr=1-again", tags: ["s-validation", "late"] });
  assert.deepEqual(of({ tags: ["s-experiment"] }, "", "x"), { name: "x-again", tags: ["s-experiment"] });
  assert.deepEqual(of({ tags: ["s-small", "s-a1b2c3d4e5f6", "runs-a1b2c3d4e5"] }), { name: "x #3-again", tags: ["s-small", "s-a1b2c3d4e5f6", "runs-a1b2c3d4e5"] });
});
