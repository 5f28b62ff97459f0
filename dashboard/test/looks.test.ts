// How lines are told apart.

import { strict as assert } from "node:assert";
import { test } from "node:test";
import { COLOURS, lookOf, PATTERNS, sampleOf, wrapped } from "../src/lib/looks.ts";

test("fifty runs have fifty looks", () => {
  const looks = Array.from({ length: 50 }, (_, at) => lookOf(at));
  assert.equal(new Set(looks.map((one) => `${one.colour} ${one.pattern}`)).size, 50);
  assert.ok(looks.every(({ colour, pattern }) => colour < COLOURS.length && pattern < PATTERNS.length));
  assert.equal(new Set(PATTERNS.map(String)).size, PATTERNS.length);
});

test("a sample shows the dashes of its line", () => {
  assert.equal(sampleOf("--c1", []), "var(--c1)");
  assert.equal(sampleOf("--c1", [9, 3, 2, 3]), "repeating-linear-gradient(90deg, var(--c1) 0px 9px, transparent 9px 12px, var(--c1) 12px 14px, transparent 14px 17px)");
});

test("a legend that is wider than its picture has several lines", () => {
  assert.deepEqual(wrapped([40, 40, 40, 200, 10], 100, 10), [
    { x: 0, line: 0 }, { x: 50, line: 0 }, { x: 0, line: 1 }, { x: 0, line: 2 }, { x: 0, line: 3 },
  ]); // prettier-ignore
});
