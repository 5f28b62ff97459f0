import assert from "node:assert/strict";
import { test } from "node:test";
import { percent, queryOf, shareLine, summary, type DataRows } from "../src/lib/data.ts";

const ALL = { text: "", share: "any share", sort: "row", page: 0, policy: "" };

test("a query names what differs from all rows in their order", () => {
  assert.equal(queryOf(ALL), "?offset=0&limit=50");
  const asked = { text: "per cent", share: "sometimes solved", sort: "-solved", page: 2, policy: "white" };
  assert.equal(queryOf(asked), "?offset=100&limit=50&text=per+cent&solved_above=0&solved_below=100&sort=-solved&policy=white");
  assert.equal(queryOf({ ...ALL, share: "never solved" }), "?offset=0&limit=50&most_solved=0");
});

test("a line of shares goes from nothing solved to all, whatever is between", () => {
  const at = (solved: number, step: number) => ({ step, played: 4, solved });
  assert.equal(shareLine([at(0, 1), at(0.5, 2), at(0.25, 3)], 90, 20), "0.0,20.0 45.0,10.0 90.0,15.0");
  assert.equal(shareLine([at(1, 1)], 90, 20), "0.0,0.0 90.0,0.0");
  assert.equal(shareLine([], 90, 20), "");
});

test("shares are percentages, and what is near none or all is not called so", () => {
  const shares = [null, 0, 0.0001, 0.004, 0.125, 199 / 200, 0.9999, 1];
  assert.deepEqual(shares.map(percent), ["–", "0 %", "0.1 %", "0.4 %", "13 %", "99.5 %", "99.9 %", "100 %"]);
});

test("the summary says what is left out", () => {
  const of: DataRows = { rows: [], total: 12, count: 7473, searched: 7473, played: 3, source: "gsm8k", solved_at: 1, first_step: 0, note: "" };
  assert.equal(summary(of), "12 of 7,473 rows of gsm8k · 3 were played · solved: reward at least 1");
  const less = { ...of, solved_at: null, searched: 100, first_step: 9, note: "no tokenizer" };
  assert.equal(summary(less), "12 of 7,473 rows of gsm8k · only the first 100 were searched · counts begin with step 9 · prompts are plain messages: no tokenizer");
});
