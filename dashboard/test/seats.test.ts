import { strict as assert } from "node:assert";
import { test } from "node:test";
import { botSeats, botsOfJob, botsOnly, choicesOf } from "../src/lib/seats.ts";

test("the bots of a job are read from its seats, and other players are none", () => {
  assert.deepEqual(botsOfJob({ white: { bot: "random", policy: null }, black: { bot: null, policy: "a" }, "p_*": { frozen: "j@1" } }), {
    white: "random",
    black: "",
    "p_*": "",
  });
  assert.deepEqual(botsOfJob(undefined), {});
});

test("a choice of the person counts before the job's, and only for seats that are there", () => {
  const playable = { seats: ["white", "black"], bots: ["random"], players: { white: "random", black: "" } };
  assert.deepEqual(choicesOf(playable, {}, { white: "", gone: "random" }), { white: "", black: "" });
  assert.equal(botsOnly({ white: "random", black: "random" }), true);
  assert.equal(botsOnly({ white: "random", black: "" }) || botsOnly({}), false);
  assert.deepEqual(botSeats(choicesOf(playable, {}, { black: "random", white: "" })), { black: "random" });
});

test("of an environment with unknown seats, a job's entries are chosen for", () => {
  const unknown = { seats: [], bots: [], players: {} };
  assert.deepEqual(choicesOf(unknown, { "player_*": "random", judge: "" }, { judge: "random" }), { "player_*": "random", judge: "random" });
});
