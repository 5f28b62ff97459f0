// The metrics in the address of a comparison.

import assert from "node:assert/strict";
import { test } from "node:test";
import { chosenMetrics, withMetrics } from "../../src/lib/compare/chosen.ts";

const ODD = ["val/task/algebra, level 1/reward", "a&metric=b", "loss"];

test("metrics with any characters come back from the address as they were", () => {
  const address = `${withMetrics(new URLSearchParams("by=tag&metric=entropy&metrics=exact"), ODD)}`;
  assert.deepEqual(chosenMetrics(new URLSearchParams(address)), ODD);
  assert.equal(new URLSearchParams(address).get("by"), "tag");
});

test("older links, with one list, show what they did", () => {
  assert.deepEqual(chosenMetrics(new URLSearchParams("metrics=loss,entropy&by=tag")), ["loss", "entropy"]);
  assert.deepEqual(chosenMetrics(new URLSearchParams("metrics=loss,loss,&metric=exact&metric=exact")), ["exact"]);
});

test("an address may name none", () => {
  for (const query of ["", "by=tag", "metrics=", "metric=", "metrics=,"]) assert.equal(chosenMetrics(new URLSearchParams(query)), null);
});
