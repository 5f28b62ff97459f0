// A match as one conversation.

import assert from "node:assert/strict";
import { test } from "node:test";
import { conversation, evaluated, weightsIn, type View, roleOf } from "../src/lib/match.ts";

const view = (seat: string, version: string): View => ({
  seat,
  stream: "",
  policy: `p-${seat}`,
  reward: 0,
  messages: [
    { role: "user", content: "your move" },
    { role: "assistant", content: "a1", turn: 0, tokens: [2, 4], versions: [version], reward: 1 },
  ],
  tokens: {
    text: ["your", "move", "a", "1", "."],
    ids: [1, 2, 3, 4, 5],
    mask: [0, 0, 1, 1, 0],
    logprobs: [0, 0, -1, -2, 0],
    advantages: null,
    versions: [[2, 4, version]],
    left_out: 0,
  },
});

test("seats speak in the order of play, each with its own weights and tokens", () => {
  const acts = conversation([view("white", "1.3"), view("black", "1.5")], [[1, 0], [1, 1], [0, 0], [0, 1]]);
  assert.deepEqual(acts.map((act) => [act.seat, act.message.content]), [["black", "your move"], ["black", "a1"], ["white", "your move"], ["white", "a1"]]);
  assert.deepEqual(weightsIn(acts), ["p-black 1.5", "p-white 1.3"]);
  assert.equal(acts[0]!.tokens, null, "what it was shown was not sampled");
  assert.deepEqual([acts[1]!.tokens?.text, acts[1]!.tokens?.logprobs, acts[1]!.tokens?.versions], [["a", "1"], [-1, -2], [[0, 2, "p-black 1.5"]]]);
});

test("tokens beyond those that were kept are counted", () => {
  const long = view("white", "1.3");
  long.tokens!.text = ["your", "move", "a"];
  const acts = conversation([long], [[0, 1]]);
  assert.deepEqual([acts[0]!.tokens?.text, acts[0]!.tokens?.left_out], [["a"], 1]);
  long.tokens!.text = ["your"];
  assert.equal(conversation([long], [[0, 1]])[0]!.tokens, null);
});

test("an evaluation of several seats is a conversation, of one seat it is not", () => {
  const { messages: said, tokens } = view("white", "1.3");
  const own = { seat: "white", stream: "", policy: "a" };
  const bot = { role: "user", content: "a1 is taken", seat: "black", stream: "", policy: "b" };
  const found = evaluated([{ ...said[0]!, ...own }, { ...said[1]!, ...own }, bot], [{ ...own, tokens }], { white: 1, black: -1, dealer: 0 });
  assert.deepEqual(found?.seats.map((one) => [one.seat, one.policy, one.reward]), [["white", "a", 1], ["black", "b", -1]]);
  assert.deepEqual(found?.acts.map((act) => [act.seat, act.weights, act.tokens?.text]), [["white", [], undefined], ["white", ["a 1.3"], ["a", "1"]], ["black", [], undefined]]);
  assert.equal(evaluated(said, [], {}), null);
});

test("a tool's result says whose it is and how long the call took", () => {
  assert.equal(roleOf({ role: "tool", content: "3", tool: "add", call_ms: 12.346 }), "tool add · 12.346 ms");
  assert.equal(roleOf({ role: "user", content: "3" }), "user");
});
