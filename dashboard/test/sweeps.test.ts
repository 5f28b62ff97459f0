import assert from "node:assert/strict";
import { test } from "node:test";
import { bestText, comparisonOf, lastName, progress, ranked, seedText, settingText, trialValue } from "../src/lib/sweeps.ts";
import type { SweepTrial } from "../src/lib/types.ts";

function trial(number: number, state: string, value: number | null, jobs: (number | null)[] = []): SweepTrial {
  const made = jobs.map((one, place) => ({ id: `j${place}`, seed: null, state: "running", step: 1, value: one }));
  return { number, state, value, reason: "", settings: {}, created: 0, finished: null, jobs: made };
}

test("finished trials come first, the best of them at the top", () => {
  const all = [trial(0, "failed", null), trial(1, "finished", 0.1), trial(2, "running", null), trial(3, "finished", 0.5)];
  const order = (goal: string): number[] => ranked({ goal, all_trials: all }).map((one) => one.number);
  assert.deepEqual(order("maximize"), [3, 1, 2, 0]);
  assert.deepEqual(order("minimize"), [1, 3, 2, 0]);
});

test("a trial that runs has the mean of its jobs so far", () => {
  assert.equal(trialValue(trial(0, "running", null, [1, null, 2])), 1.5);
  assert.equal(trialValue(trial(0, "running", null, [null])), null);
  assert.equal(trialValue(trial(0, "finished", 3, [1])), 3);
});

test("settings have their last name, unless two share it", () => {
  const paths = ["train.lr", "algorithm.critic.lr", "train.steps"];
  assert.deepEqual(paths.map((path) => lastName(path, paths)), ["train.lr", "algorithm.critic.lr", "steps"]);
  assert.deepEqual([1, "a", true, { b: 1 }].map(settingText), ["1", "a", "true", '{"b":1}']);
});

test("settings have four digits, so that near ones of a search are told apart", () => {
  assert.deepEqual([1.2149e-4, 1.24e-4, 1.5e-7, 0.1 + 0.2, 123456.7, 1024].map(settingText), ["0.0001215", "0.000124", "1.5e-7", "0.3", "123500", "1024"]);
});

test("a job's seed and value are shown where there are seeds", () => {
  const job = { id: "j1", seed: 2, state: "running", step: 1, value: 0.5 };
  assert.equal(seedText(job), " (seed 2: 0.5)");
  assert.equal(seedText({ ...job, value: null }), " (seed 2)");
  assert.equal(seedText({ ...job, seed: null }), "");
});

test("the best value so far never gets worse, in the order in which trials ended", () => {
  const ended = (number: number, value: number | null, finished: number | null): SweepTrial => ({ ...trial(number, "finished", value), finished });
  const all = [ended(0, 0.5, 30), ended(1, 0.2, 10), ended(2, 0.4, 40), ended(3, null, 5), ended(4, 0.9, null)];
  assert.deepEqual(progress({ goal: "maximize", all_trials: all }), { values: [0.2, 0.5, 0.4], best: [0.2, 0.5, 0.5] });
  assert.deepEqual(progress({ goal: "minimize", all_trials: all }).best, [0.2, 0.2, 0.2]);
});

test("a trial that was stopped early is never the best", () => {
  const all = [{ ...trial(0, "stopped", 0.9), finished: 10 }, { ...trial(1, "finished", 0.5), finished: 20 }, { ...trial(2, "cancelled", 0.8), finished: 30 }];
  assert.deepEqual(progress({ goal: "maximize", all_trials: all }), { values: [0.5], best: [0.5] });
});

test("the best trial is said with its value and its settings", () => {
  assert.equal(bestText({ best: { number: 3, value: 0.91, settings: { "train.lr": 1e-4, "algorithm.group_size": 8 } } }), "0.91 of trial 3: lr 0.0001, group_size 8");
  assert.equal(bestText({ best: null }), "");
});

test("the jobs of a sweep with seeds are compared as means of each configuration", () => {
  assert.equal(comparisonOf({ all_trials: [trial(0, "finished", 1, [1, 1])] }, ["j-1", "j-2"]), "/compare/j-1,j-2/by%3Dsettings");
  assert.equal(comparisonOf({ all_trials: [trial(0, "finished", 1, [1])] }, ["j-1"]), "/compare/j-1");
});
