// Models of a Tinker server: names, lines about them, and their curves.

import assert from "node:assert/strict";
import { test } from "node:test";
import { MODEL_PANELS, modelsIn, MOST } from "../src/lib/curves/models.ts";
import { Joined } from "../src/lib/live/join.ts";
import { connection, queueTime, shortModel, summary, waits, type ServedModel } from "../src/lib/tinker.ts";

const ID = "s-4f2a91c0ffee4f2a91c0:train:3";

function joined(...points: [number, number, Record<string, number>][]): Joined {
  const found = new Joined();
  points.forEach(([time, step, values], seq) => found.add({ source: "trainer", incarnation: "a", seq, time, step, values }));
  return found;
}

test("ids of models are short, and those of anything else stay", () => {
  assert.equal(shortModel(ID), "s-4f2a91:3");
  assert.equal(shortModel("whatever"), "whatever");
});

test("a line says whose models there are and what the trainer's queue is", () => {
  const models = [{} as ServedModel];
  assert.equal(summary({ base: "b", queue: "slots 3/8", models, total: 1, others: null }), "1 model · slots 3/8");
  const others = { models: 2, alive: 1, waiting: 1 };
  assert.equal(summary({ base: "b", queue: "", models, total: 7, others }), "1 of 7 models · other tenants: 2 models, 1 with a client, 1 command waiting");
  assert.equal(summary({ base: "b", queue: "", models: [], total: 0, others: { models: 0, alive: 0, waiting: 0 } }), "0 models");
});

test("a model says what it waits for only while it has commands", () => {
  assert.equal(waits({ waiting: 2, waiting_for: "the trainer" }), "the trainer (2 commands)");
  assert.equal(waits({ waiting: 0, waiting_for: "" }), "");
  assert.equal(queueTime(0.00123), "1.20 ms");
  assert.equal(queueTime(2), "2 s");
});

test("clients get the address of the page, below a proxy's path too", () => {
  const url = (pathname: string): string => connection({ origin: "https://a.example", pathname })[1]!;
  assert.equal(url("/"), "export TINKER_BASE_URL=https://a.example");
  assert.equal(url("/tinker/"), "export TINKER_BASE_URL=https://a.example/tinker");
});

test("each model has its own line, by its own passes", () => {
  const other = ID.replace(/3$/, "4");
  const found = joined(
    [1, 1, { [`models/${ID}/loss`]: 3, [`models/${ID}/tokens`]: 9 }],
    [2, 7, { [`models/${other}/loss`]: 5 }],
    [3, 2, { [`models/${ID}/loss`]: 2 }],
    [4, 9, { "trainer/models": 8 }],
  );
  const lines = (title: string): [string, number[], number[]][] =>
    MODEL_PANELS.find((panel) => panel.title === title)!.lines(found, "step").map(({ label, x, y }) => [label, x, y]);
  assert.deepEqual(lines("Loss of models"), [
    ["s-4f2a91:3", [1, 2], [3, 2]],
    ["s-4f2a91:4", [7], [5]],
  ]);
  assert.deepEqual(lines("Adapters"), [["models", [9], [8]]]);
});

test("of many models those are drawn that were trained last", () => {
  const found = joined(...Array.from({ length: MOST + 2 }, (_, n): [number, number, Record<string, number>] => [n, 1, { [`models/s-${n}:train:0/loss`]: 1 }]));
  const kept = modelsIn(found);
  assert.equal(kept.length, MOST);
  assert.ok(!kept.includes("s-0:train:0") && !kept.includes("s-1:train:0") && kept.includes(`s-${MOST + 1}:train:0`));
});
