// What has ended since the last look.

import { strict as assert } from "node:assert";
import { test } from "node:test";
import { alarmsSince, dismissed, happenedSince, isCut, looked } from "../../src/lib/jobs/away.ts";
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

function storage(entries: [string, string][] = []): Pick<Storage, "getItem" | "setItem" | "removeItem"> {
  const kept = new Map(entries);
  return { getItem: (name) => kept.get(name) ?? null, setItem: (name, value) => void kept.set(name, value), removeItem: (name) => void kept.delete(name) };
}

test("a first look, and one after a moment, have nothing before them", () => {
  assert.equal(looked(1000, storage()).since, null);
  assert.equal(looked(1000, storage([["opentinker-seen", "900"]])).since, null);
  assert.equal(looked(1000, storage([["opentinker-seen", "nonsense"]])).since, null);
});

test("an absence is told at every look until it is dismissed, and a second one adds to it", () => {
  const kept = storage([["opentinker-seen", "600"]]);
  assert.deepEqual(looked(1000, kept), { since: 600, returned: true });
  assert.deepEqual(looked(1010, kept), { since: 600, returned: false }); // back from a job's view
  assert.deepEqual(looked(9000, kept), { since: 600, returned: true }); // a night later, in the same tab
  dismissed(kept);
  assert.deepEqual(looked(9010, kept), { since: null, returned: false });
  assert.deepEqual(looked(9900, kept), { since: 9010, returned: true });
});

test("a list that stops before all that has ended is cut", () => {
  const ended = [job("b", 130), job("a", 110)];
  assert.equal(isCut(100, ended, true), true);
  assert.equal(isCut(100, ended, false), false);
  assert.equal(isCut(110, ended, true), false);
  assert.equal(isCut(100, [job("a", null)], true), false);
});

test("of each alarm since then the newest is told", () => {
  const event = (name: string, time: number, value = 0): Event => ({ id: "1-0", event: name, time, ...(value && { metric: "entropy", value, hint: "lower train.lr" }) });
  const events = [event("collapse_alarm", 90), event("collapse_alarm", 110, 0.5), event("collapse_alarm", 120, 0.25), event("checkpoint", 130), event("environment_down", 125)];
  assert.deepEqual(
    alarmsSince(100, job("j", null), events).map((one) => [one.at, one.state, one.reason, one.time]),
    [["#/jobs/j/log", "alarm", "collapse alarm: entropy is 0.25; lower train.lr", 120], ["#/jobs/j/log", "alarm", "environment down", 125]],
  );
});
