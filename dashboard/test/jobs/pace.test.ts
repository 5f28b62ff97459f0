import assert from "node:assert/strict";
import { test } from "node:test";
import { secondsLeft } from "../../src/lib/jobs/pace.ts";

const job = { state: "running", step: 10, steps: 40, since: 1000, epoch: 1, progress: {} };

test("time left is at the pace of the last steps, else of those since its one start; waiting is no pace", () => {
  assert.equal(secondsLeft(job, 1050), 150);
  assert.equal(secondsLeft({ ...job, progress: { step_seconds: 2 } }, 1050), 60);
  assert.equal(secondsLeft({ ...job, epoch: 2 }, 1050), null); // its steps were made since earlier starts
  assert.equal(secondsLeft({ ...job, epoch: 2, progress: { step_seconds: 2 } }, 1050), 60);
});

test("of a job that does not run, has no end or has begun nothing, none is known", () => {
  for (const state of ["queued", "paused", "succeeded"]) assert.equal(secondsLeft({ ...job, state }, 1050), null);
  assert.equal(secondsLeft({ ...job, steps: 0 }, 1050), null);
  assert.equal(secondsLeft({ ...job, step: 0 }, 1050), null);
});
