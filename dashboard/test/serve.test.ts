// Specs made of jobs, and what their checkpoints are.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Problem } from "../src/lib/api.ts";
import { cloneSpec, inferenceSpec, savesAdapters, sweepOf } from "../src/lib/serve.ts";
import type { JobDetail, Sweep } from "../src/lib/types.ts";

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

/** A job "j-1" among the jobs of the sweeps `of`; other sweeps in `others` have other jobs. */
async function clone(spec: object, of: string[], { step = "", name = "x #3", others = [] as string[] } = {}): Promise<unknown> {
  const job = { id: "j-1", name, spec } as unknown as JobDetail;
  const trials = (id: string): unknown => [{ jobs: [{ id: "j-0" }] }, { jobs: [{ id: "j-2" }, { id }] }];
  const read = async (id: string): Promise<Pick<Sweep, "all_trials">> => {
    if (![...of, ...others].includes(id)) throw new Problem(404, "no such sweep");
    return { all_trials: trials(of.includes(id) ? "j-1" : "j-3") } as Pick<Sweep, "all_trials">;
  };
  return cloneSpec(job, step, await sweepOf(job, read));
}

test("the clone of a sweep's job has the job's tags, but not the sweep's", async () => {
  const train = { lr: 1e-4 };
  const sweep = "s-a1b2c3d4e5";
  assert.deepEqual(await clone({ name: "x #3", tags: ["maths", sweep], train }, [sweep]), { name: "x #3-again", tags: ["maths"], train });
  assert.deepEqual(await clone({ tags: [sweep] }, [sweep], { step: "5" }), { name: "x #3-again", start: { from: "j-1@5" } });
  const late = { tags: ["s-validation", sweep, "late"] };
  assert.deepEqual(await clone(late, [sweep], { name: "best" }), { name: "best-again", tags: ["s-validation", "late"] });
});

test("tags that only look like a sweep's id stay", async () => {
  for (const tags of [["s-validation"], ["s-small", "s-a1b2c3d4e5f6", "runs-a1b2c3d4e5"], ["s-a1b2c3d4e5"]]) {
    assert.deepEqual(await clone({ tags }, [], { name: "run #3", others: ["s-a1b2c3d4e5"] }), { name: "run #3-again", tags });
  }
});

test("a job whose sweep cannot be read is not cloned as one without", async () => {
  const job = { id: "j-1", name: "x", spec: { tags: ["s-a1b2c3d4e5"] } } as unknown as JobDetail;
  await assert.rejects(sweepOf(job, () => Promise.reject(new Problem(503, "unavailable"))), /unavailable/);
});
