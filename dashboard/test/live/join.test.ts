import assert from "node:assert/strict";
import { test } from "node:test";
import { Joined, MOST_POINTS, sizeOf } from "../../src/lib/live/join.ts";
import type { Point } from "../../src/lib/types.ts";

const point = (seq: number, source = "trainer", incarnation = "a"): Point => ({
  source,
  incarnation,
  seq,
  time: 1000 + seq,
  step: seq,
  values: { x: seq },
});

test("a point counts once, whichever way it came", () => {
  const joined = new Joined();
  assert.equal(joined.add(point(0)), true);
  assert.equal(joined.add(point(0)), false);
  assert.deepEqual(joined.sources.get("trainer")?.map((p) => p.seq), [0]);
});

test("live first and history afterwards make one series in the order of time", () => {
  const joined = new Joined();
  for (const seq of [7, 8, 3, 0, 1, 2, 8, 4, 5, 6]) joined.add(point(seq));
  assert.deepEqual(joined.sources.get("trainer")?.map((p) => p.seq), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
  assert.deepEqual(joined.gaps(), []);
});

test("a gap is what lies between, by source and incarnation, and goes when it is filled", () => {
  const joined = new Joined();
  for (const seq of [0, 1, 5, 6, 9]) joined.add(point(seq));
  joined.add(point(4, "trainer", "b")); // a restart: its count begins anew, and what came before may be anything
  joined.add(point(2, "rollout-0"));
  assert.deepEqual(joined.gaps(), [
    { source: "trainer", incarnation: "a", from: 2, to: 4 },
    { source: "trainer", incarnation: "a", from: 7, to: 8 },
  ]);
  assert.equal(sizeOf(joined.gaps()), 5);
  for (const seq of [3, 2, 4]) joined.add(point(seq));
  assert.deepEqual(joined.gaps(), [{ source: "trainer", incarnation: "a", from: 7, to: 8 }]);
});

test("what nobody has is counted and asked for no more, and taken if it comes after all", () => {
  const joined = new Joined();
  for (const seq of [0, 4, 8]) joined.add(point(seq));
  joined.giveUp(joined.gaps()[0]!);
  assert.deepEqual(joined.gaps(), [{ source: "trainer", incarnation: "a", from: 5, to: 7 }]);
  assert.equal(joined.missing, 3);
  assert.equal(joined.add(point(2)), true);
});

test("any order and any number of copies give the same", () => {
  let state = 7;
  const random = (below: number): number => (state = (state * 48271) % 2147483647) % below;
  for (let round = 0; round < 200; round += 1) {
    const joined = new Joined();
    const given = new Set<number>();
    for (let i = 0; i < 40; i += 1) {
      const seq = random(50);
      assert.equal(joined.add(point(seq)), !given.has(seq));
      given.add(seq);
    }
    const last = Math.max(...given);
    const first = Math.min(...given);
    const missing = Array.from({ length: last - first + 1 }, (_, i) => first + i).filter((n) => !given.has(n));
    assert.equal(sizeOf(joined.gaps()), missing.length);
    assert.deepEqual(joined.sources.get("trainer")!.map((p) => p.seq), [...given].sort((a, b) => a - b));
  }
});

test("all sources together hold no more than a tab should, and whoever says most loses first", () => {
  const joined = new Joined();
  for (let seq = 0; seq < 100; seq += 1) joined.add(point(seq));
  for (let seq = 0; seq < MOST_POINTS; seq += 1) joined.add(point(seq, `rollout-${seq % 3}`, `${seq % 3}`));
  const held = [...joined.sources.values()].reduce((sum, points) => sum + points.length, 0);
  assert.ok(held <= MOST_POINTS && held > MOST_POINTS * 0.9);
  assert.equal(held + joined.forgotten, MOST_POINTS + 100);
  assert.equal(joined.sources.get("trainer")!.length, 100);
});
