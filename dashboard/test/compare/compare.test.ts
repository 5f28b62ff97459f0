import assert from "node:assert/strict";
import { test } from "node:test";
import { curve, curvesTable, differences, ending, grouped, groupsOf, labelsOf, metricNames, scatter, settingGroupings, tagGroupings, type Run } from "../../src/lib/compare/compare.ts";

function run(id: string, lr: number, values: number[], tags: string[] = []): Run {
  const points = values.map((value, step) => ({ source: "trainer", incarnation: "i", seq: step, time: step, step: step + 1, values: { reward: value } }));
  return { id, name: `run ${id}`, tags, spec: { name: id, train: { lr, steps: 5 }, algorithm: { preset: "grpo" } }, points };
}

test("settings that differ are told apart, and names are none", () => {
  const runs = [run("a", 0.1, []), run("b", 0.2, [])];
  assert.deepEqual(differences(runs.map((one) => one.spec)), [{ path: "train.lr", values: ["0.1", "0.2"] }]);
  assert.deepEqual(differences([{ a: 1 }, {}]), [{ path: "a", values: ["1", ""] }]);
});

test("a metric's end is its best, its last and its mean over the steps", () => {
  const line = curve(run("a", 0.1, [0, 1, 0.5]), "reward");
  assert.deepEqual([line.x, line.y], [[1, 2, 3], [0, 1, 0.5]]);
  assert.deepEqual(ending(line), { best: 1, last: 0.5, area: 0.625 });
  assert.equal(ending(curve(run("a", 0.1, []), "reward")), null);
  assert.equal(ending(line, "falls")!.best, 0);
  assert.equal(ending(line, "rises")!.best, 1);
  const long = curve(run("a", 0.1, Array.from({ length: 300_000 }, (_, at) => at)), "reward");
  assert.equal(ending(long)!.best, 299_999);
});

test("steps that were trained again count once", () => {
  const again = run("a", 0.1, [0, 1, 2]);
  again.points.push({ source: "trainer", incarnation: "j", seq: 0, time: 9, step: 2, values: { reward: 5 } });
  assert.deepEqual(curve(again, "reward").y, [0, 5]);
});

test("seeds of one setting become a mean with its spread, as far as all have come", () => {
  const runs = [run("a", 0.1, [0, 2, 4]), run("b", 0.1, [2, 4]), run("c", 0.2, [9])];
  const lines = grouped(runs.map((one) => curve(one, "reward")), groupsOf(runs, "train.lr"));
  assert.deepEqual(lines.map((line) => line.label), ["0.1 (2)", "0.2 (1)"]);
  assert.deepEqual([lines[0]!.x, lines[0]!.y, lines[0]!.low], [[1, 2, 3], [1, 3, 4], [0, 2, 4]]);
  assert.deepEqual(groupsOf([run("a", 1, [], ["x", "y"]), run("b", 1, [])], "tag"), ["x + y", ""]);
});

test("runs are told apart by their ids where they share a name", () => {
  const named = [["j-1", "first"], ["j-2", "again"], ["j-3", "again"]].map(([id, name]) => ({ id: id!, name: name! }));
  assert.deepEqual(labelsOf(named), ["first", "again j-2", "again j-3"]);
});

test("a setting is drawn against how a metric ended", () => {
  const runs = [run("a", 0.1, [0, 2]), run("b", 0.2, [])];
  assert.deepEqual(scatter(runs, "train.lr", "reward"), [{ x: 0.1, y: 2, label: "run a a", run: 0 }]);
  assert.deepEqual(scatter(runs, "algorithm.preset", "reward"), []);
  assert.deepEqual(metricNames(runs), ["reward"]);
});

test("seeds of a sweep over several settings are one group for each configuration", () => {
  const seeded = (id: string, lr: number, size: number, seed: number): Run => ({
    ...run(id, lr, [seed]),
    spec: { name: id, train: { lr, seed }, rollout: { seed }, algorithm: { group_size: size } },
  });
  const runs = [seeded("a", 0.1, 4, 1), seeded("b", 0.1, 4, 2), seeded("c", 0.1, 8, 1), seeded("d", 0.2, 8, 1)];
  const groupings = settingGroupings(differences(runs.map((one) => one.spec)));
  assert.deepEqual(groupings[0], ["settings", "by all settings but seeds"]);
  const lines = grouped(runs.map((one) => curve(one, "reward")), groupsOf(runs, "settings"));
  assert.deepEqual(lines.map((line) => [line.label, line.y]), [["group_size 4, lr 0.1 (2)", [1.5]], ["group_size 8, lr 0.1 (1)", [1]], ["group_size 8, lr 0.2 (1)", [1]]]);
  const rates = (...all: number[]): string[] => groupsOf(all.map((lr) => seeded("a", lr, 4, 1)), "settings");
  assert.deepEqual(rates(0.00123456789, 0.2), ["lr 0.001235", "lr 0.2"]);
  assert.deepEqual(rates(0.00123456, 0.00123457), ["lr 0.00123456", "lr 0.00123457"]);
  assert.deepEqual(groupsOf(runs.slice(0, 2), "settings"), ["same settings", "same settings"]);
  assert.deepEqual(settingGroupings(differences(runs.slice(2).map((one) => one.spec))), [["train.lr", "by train.lr"]]);
});

test("runs are grouped by the value of one tag, or by whether they have it, whatever their other tags are", () => {
  const runs = [run("a", 1, [], ["small", "seed-1"]), run("b", 1, [], ["small", "seed-2"]), run("c", 1, [], ["rank=8", "seed-1"])];
  const found = tagGroupings(runs).map(([, text]) => text);
  assert.deepEqual(found.slice(0, 3), ["by all tags", "by tag rank", "by tag seed"]);
  const by = (text: string): string[] => groupsOf(runs, tagGroupings(runs).find((one) => one[1] === text)![0]);
  assert.deepEqual(by("by tag seed"), ["1", "2", "1"]);
  assert.deepEqual(by("by tag rank"), ["", "", "8"]);
  assert.deepEqual(by("with or without tag small"), ["small", "small", "not small"]);
  assert.deepEqual(tagGroupings([run("a", 1, []), run("b", 1, [])]), []);
  assert.deepEqual(tagGroupings([run("a", 1, [], ["x"]), run("b", 1, [], ["x"])]), [["tag", "by all tags"]]);
});

test("groups have looks of their own too", () => {
  const runs = [run("a", 0.1, [0, 2]), run("b", 0.2, [9])];
  const lines = grouped(runs.map((one) => curve(one, "reward")), groupsOf(runs, "train.lr"));
  assert.deepEqual(lines.map(({ colour, pattern }) => [colour, pattern]), [[0, 0], [1, 0]]);
});

test("curves are a table with a row for each step of each run", () => {
  assert.deepEqual(curvesTable([run("a", 1, [0, 2]), run("b", 1, [])], ["reward", "loss"]), [
    ["id", "name", "step", "reward", "loss"],
    ["a", "run a", "1", "0", ""],
    ["a", "run a", "2", "2", ""],
  ]);
});
