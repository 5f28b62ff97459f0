// What has ended since the last look.

import { strict as assert } from "node:assert";
import { test } from "node:test";
import { alarmsSince, happenedSince, lastLook } from "../../src/lib/jobs/away.ts";
import type { Event, Job, SweepSummary } from "../../src/lib/types.ts";

function job(id: string, finished: number | null, tags: string[] = []): Job {
  return { id, name: id, state: "succeeded", reason: "", finished, tags } as unknown as Job;
}

const SWEEP = { id: "s-1", name: "lr", state: "failed", reason: "budget", finished: 120 } as unknown as SweepSummary;

test("jobs and sweeps that ended since are told, the newest first, and a sweep's jobs by the sweep", () => {
  const jobs = [job("old", 90), job("new", 110), job("runs", null), job("child", 115, ["a", "s-1"])];
  assert.deepEqual(
    happenedSince(100, jobs, [SWEEP]).map((one) => [one.at, one.state, one.reason]),
    [["#/sweeps/s-1", "failed", "budget"], ["#/jobs/new", "succeeded", ""]],
  );
});

test("a first look, and one after a moment, have nothing before them", () => {
  assert.equal(lastLook(1000, null), null);
  assert.equal(lastLook(1000, "900"), null);
  assert.equal(lastLook(1000, "600"), 600);
  assert.equal(lastLook(1000, "nonsense"), null);
});

test("of each alarm since then the newest is told", () => {
  const event = (name: string, time: number, value = 0): Event => ({ id: "1-0", event: name, time, ...(value && { metric: "entropy", value, hint: "lower train.lr" }) });
  const events = [event("collapse_alarm", 90), event("collapse_alarm", 110, 0.5), event("collapse_alarm", 120, 0.25), event("checkpoint", 130), event("environment_down", 125)];
  assert.deepEqual(
    alarmsSince(100, job("j", null), events).map((one) => [one.at, one.state, one.reason, one.time]),
    [["#/jobs/j/log", "alarm", "collapse alarm: entropy is 0.25; lower train.lr", 120], ["#/jobs/j/log", "alarm", "environment down", 125]],
  );
});
