import assert from "node:assert/strict";
import { test } from "node:test";
import { chosen } from "../src/lib/choosing.ts";

test("keys go from one thing to the next, and not beyond the ends", () => {
  assert.deepEqual(["ArrowRight", "ArrowLeft", "Home", "End"].map((key) => chosen(null, 3, key)), [0, 2, 0, 2]);
  assert.deepEqual(["ArrowRight", "ArrowLeft", "Home", "End", "Escape"].map((key) => chosen(1, 3, key)), [2, 0, 0, 2, null]);
  assert.deepEqual(["ArrowRight", "ArrowLeft"].map((key) => [chosen(2, 3, key), chosen(0, 3, key)]), [[2, 1], [1, 0]]);
});

test("what means nothing here is left to the page", () => {
  for (const key of ["Tab", "Enter", "constructor", " "]) assert.equal(chosen(1, 3, key), undefined);
  assert.equal(chosen(null, 3, "Escape"), undefined);
  assert.equal(chosen(null, 0, "End"), undefined);
});
