// Axes of numbers.

import { strict as assert } from "node:assert";
import { test } from "node:test";
import { axisOver } from "../../src/lib/compare/axis.ts";

test("round numbers are written at an axis, and every value lies on it", () => {
  const axis = axisOver([4, 8, 16], 5, true);
  assert.deepEqual([axis.isLog, axis.ticks], [false, [5, 10, 15]]);
  const places = [4, 8, 16].map(axis.place);
  assert.ok(places[0]! > 0 && places[2]! < 1 && Math.abs(places[1]! - places[0]! - (places[2]! - places[0]!) / 3) < 1e-9);
});

test("wide numbers are placed by orders of magnitude, if they may be", () => {
  const axis = axisOver([1e-5, 1e-3], 5, true);
  assert.deepEqual([axis.isLog, axis.ticks], [true, [1e-5, 1e-4, 1e-3].map((one) => 10 ** Math.round(Math.log10(one)))]);
  assert.ok(Math.abs(axis.place(1e-4) - 0.5) < 1e-9);
  assert.equal(axisOver([1e-5, 1e-3], 5, false).isLog, false);
  assert.deepEqual(axisOver([2, 90], 5, true).ticks, [2, 90]);
});

test("equal values, zeros and negative ones have an axis too", () => {
  for (const values of [[3, 3], [0, 0], [-2, -1]]) {
    const axis = axisOver(values, 4, true);
    assert.ok(axis.ticks.length > 0 && axis.ticks.every(Number.isFinite), String(values));
    assert.ok(values.map(axis.place).every((at) => at > 0 && at < 1), String(values));
  }
});
