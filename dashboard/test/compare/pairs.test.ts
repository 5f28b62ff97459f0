// Episodes of two runs beside each other.

import { strict as assert } from "node:assert";
import { test } from "node:test";
import { pairs } from "../../src/lib/compare/pairs.ts";

function played(index: number, state: number, sample: number, question: string): { index: number; state: number; sample: number; messages: { role: string; content: string }[] } {
  return { index, state, sample, messages: [{ role: "user", content: question }, { role: "assistant", content: `${index}` }] };
}

test("episodes with the same beginning stand beside each other, once each", () => {
  const left = [played(0, 0, 0, "a"), played(1, 0, 1, "a"), played(2, 1, 0, "b"), played(3, 2, 0, "c")];
  const right = [played(0, 1, 0, "b"), played(1, 0, 0, "a"), played(2, 2, 0, "another c")];
  assert.deepEqual(pairs(left, right).map(([one, other]) => [one.index, other.index]), [[0, 1], [2, 0]]);
  assert.deepEqual(pairs(left, []), []);
});
