// Specs made of jobs, and what their checkpoints are.

import assert from "node:assert/strict";
import { test } from "node:test";
import { savesAdapters } from "../src/lib/serve.ts";
import type { JobDetail } from "../src/lib/types.ts";

test("a job with lora saves adapters, any other whole models", () => {
  const of = (model: object): boolean => savesAdapters({ spec: { model } } as unknown as JobDetail);
  assert.equal(of({ base: "m", lora: { rank: 8 } }), true);
  assert.equal(of({ base: "m", lora: null }), false);
  assert.equal(of({ base: "m" }), false);
  assert.equal(savesAdapters({ spec: null } as unknown as JobDetail), false);
});
