// Episodes of two runs beside each other.

import { strict as assert } from "node:assert";
import { test } from "node:test";
import type { Run } from "../../src/lib/compare/compare.ts";
import { chosenSides, pairs, sidesOf } from "../../src/lib/compare/pairs.ts";

function played(index: number, state: number, sample: number, question: string): { index: number; state: number; sample: number; messages: { role: string; content: string }[] } {
  return { index, state, sample, messages: [{ role: "user", content: question }, { role: "assistant", content: `${index}` }] };
}

test("episodes with the same beginning stand beside each other, once each", () => {
  const left = [played(0, 0, 0, "a"), played(1, 0, 1, "a"), played(2, 1, 0, "b"), played(3, 2, 0, "c")];
  const right = [played(0, 1, 0, "b"), played(1, 0, 0, "a"), played(2, 2, 0, "another c")];
  assert.deepEqual(pairs(left, right).map(([one, other]) => [one.index, other.index]), [[0, 1], [2, 0]]);
  assert.deepEqual(pairs(left, []), []);
});

test("games stand beside those against the same opponent, where there are several", () => {
  const games = (...opponents: string[]): (ReturnType<typeof played> & { opponent: string })[] =>
    opponents.flatMap((opponent, place) => [0, 1].map((state) => ({ ...played(2 * place + state, state, 0, `row ${state}`), opponent })));
  const met = (...[left, right]: [string[], string[]]): string[][] =>
    pairs(games(...left), games(...right)).map(([one, other]) => [`${one.opponent} ${one.state}`, `${other.opponent} ${other.state}`]);
  const random = [["random 0", "random 0"], ["random 1", "random 1"]];
  assert.deepEqual(met(["random", "greedy"], ["random", "greedy"]), [...random, ["greedy 0", "greedy 0"], ["greedy 1", "greedy 1"]]);
  assert.deepEqual(met(["random"], ["greedy", "random"]), random);
  assert.deepEqual(met(["greedy", "random"], ["random"]), random);
  assert.deepEqual(met(["random"], ["other"]), [["random 0", "other 0"], ["random 1", "other 1"]], "each has one alone: both are shown");
});

test("of a job with several policies each has episodes of its own", () => {
  const run = (id: string, ...policies: string[]): Run => ({ id, name: "n", tags: [], points: [], spec: policies.length ? { policies: Object.fromEntries(policies.map((one) => [one, {}])) } : {} });
  const chosen = (runs: Run[], named: string): string[] | undefined => chosenSides(sidesOf(runs), named)?.map(({ at }) => at);
  const two = [run("j-1", "speaker", "guesser"), run("j-2", "guesser", "speaker")];
  assert.deepEqual(sidesOf(two)[1], { at: "j-1~guesser", job: "j-1", policy: "guesser", text: "n j-1 guesser" });
  assert.deepEqual(chosen(two, ""), ["j-1~speaker", "j-2~speaker"]);
  assert.deepEqual(chosen(two, "j-2~guesser,j-1~guesser"), ["j-2~guesser", "j-1~guesser"]);
  assert.deepEqual(chosen([run("j-1"), run("j-2")], "j-9,j-1"), ["j-1", "j-1"]);
  assert.deepEqual(chosen([run("j-1"), run("j-2", "a")], ""), ["j-1", "j-2~a"]);
  assert.deepEqual(chosen([run("j-1", "a", "b")], ""), ["j-1~a", "j-1~b"]);
  assert.equal(chosen([run("j-1")], ""), undefined);
});
