// Specs made of jobs, and what their checkpoints are.

import assert from "node:assert/strict";
import { test } from "node:test";
import { inferenceSpec, savesAdapters } from "../src/lib/serve.ts";
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
