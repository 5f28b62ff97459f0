import assert from "node:assert/strict";
import { test } from "node:test";
import { Follow } from "../../src/lib/live/follow.ts";
import type { Hearing, Subscription } from "../../src/lib/live/live.ts";
import { browser } from "../browser.ts";

const nothing = () => ({ metrics: [], cursor: 0, more: false });

test("whoever is refused asks again now and then, however often it was told", async (t) => {
  const { pass } = browser(t, nothing);
  let tries = 0;
  const refused = async (_job: string, hearing: Hearing): Promise<Subscription> => {
    tries += 1;
    hearing.failed("permissions violation");
    throw new Error("permissions violation");
  };
  const follow = new Follow("j", [], async () => refused);
  await pass(120);
  assert.equal(follow.way, "polling");
  assert.ok(tries > 4 && tries < 10, `${tries} tries in two minutes`);
  follow.close();
  const before = tries;
  await pass(60);
  assert.equal(tries, before);
});

test("what an earlier connection says changes nothing of the one that follows it", async (t) => {
  const { pass } = browser(t, nothing);
  const heard: Hearing[] = [];
  let closed = 0;
  const subscribe = async (_job: string, hearing: Hearing): Promise<Subscription> => {
    heard.push(hearing);
    hearing.open();
    return { close: async () => void (closed += 1) };
  };
  const follow = new Follow("j", [], async () => subscribe);
  await pass(1);
  heard[0]!.failed("gone");
  await pass(20);
  assert.deepEqual([heard.length, follow.way, closed], [2, "live", 1]);
  heard[0]!.failed("gone again");
  heard[0]!.away("away");
  assert.equal(follow.way, "live");
  follow.close();
  assert.equal(closed, 2);
});

test("a job that is over before it is heard leaves no connection", async (t) => {
  const { pass } = browser(t, nothing);
  let closed = 0;
  let begin = (): void => {};
  const subscribe = (): Promise<Subscription> =>
    new Promise((done) => (begin = () => done({ close: async () => void (closed += 1) })));
  const follow = new Follow("j", [], async () => subscribe);
  follow.end();
  await pass(1);
  assert.equal(follow.way, "ended");
  begin();
  await pass(1);
  assert.equal(closed, 1);
});
