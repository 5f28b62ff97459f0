import assert from "node:assert/strict";
import { test } from "node:test";
import type { NatsConnection } from "@nats-io/nats-core";
import { subscribe, type Hearing } from "../../src/lib/live/live.ts";
import { browser, NOW } from "../browser.ts";

const LASTS_S = 100;

/** A connection that is told what the server does. */
class Wire {
  open = true;
  refuse = (_why: string): void => {};
  private ended = (): void => {};
  private readonly end = new Promise<void>((done) => (this.ended = done));

  private readonly answers: Promise<void>;

  constructor(answers: Promise<void> = Promise.resolve()) {
    this.answers = answers;
  }

  subscribe(_subject: string, { callback }: { callback: (error: Error | null, message: unknown) => void }): void {
    this.refuse = (why) => callback(new Error(why), null);
  }

  flush(): Promise<void> {
    return this.answers;
  }

  async *status(): AsyncGenerator<never> {
    await this.end;
  }

  closed(): Promise<void> {
    return this.end;
  }

  async close(): Promise<void> {
    this.open = false;
    this.ended();
  }
}

const credentials = () => ({ servers: [], token: "", inbox: "", expires_at: Date.now() / 1000 + LASTS_S, subjects: { metrics: "m" } });
const using = (...wires: Wire[]) => async () => wires.shift() as unknown as NatsConnection;

function hearing(): { told: string[]; hearing: Hearing } {
  const told: string[] = [];
  const say = (what: string) => (why = "") => void told.push(`${what} ${why}`.trim());
  return { told, hearing: { messages: { metrics: () => {} }, open: say("open"), away: say("away"), failed: say("failed") } };
}

test("who may not hear it at all is told so once, and leaves no connection", async (t) => {
  browser(t, credentials);
  const wire = new Wire();
  const { told, hearing: heard } = hearing();
  const done = subscribe("j", heard, async () => {
    wire.flush = async () => wire.refuse("no permission");
    return wire as unknown as NatsConnection;
  });
  await assert.rejects(done, /no permission/);
  wire.refuse("no permission");
  assert.deepEqual([told, wire.open], [[], false]);
});

test("one that is closed while it renews closes the new connection too", async (t) => {
  const { pass } = browser(t, credentials);
  let answer = (): void => {};
  const wires = [new Wire(), new Wire(new Promise((done) => (answer = done)))];
  const { told, hearing: heard } = hearing();
  const live = await subscribe("j", heard, using(...wires));
  await pass(LASTS_S * 0.7);
  assert.deepEqual(wires.map((one) => one.open), [true, true]);
  await live.close();
  answer();
  await pass(LASTS_S);
  assert.deepEqual(wires.map((one) => one.open), [false, false]);
  assert.deepEqual(told, ["open"]);
});

test("a renewal takes the place of what was before", async (t) => {
  const { pass } = browser(t, credentials);
  const wires = [new Wire(), new Wire()];
  const { told, hearing: heard } = hearing();
  const live = await subscribe("j", heard, using(...wires));
  await pass(LASTS_S * 0.7);
  assert.deepEqual(wires.map((one) => one.open), [false, true]);
  assert.deepEqual(told, ["open"]);
  await live.close();
});

test("one that cannot be renewed ends, closed, and says so once", async (t) => {
  const { pass } = browser(t, () => {
    if (Date.now() / 1000 > NOW + 1) throw new Error("away");
    return credentials();
  });
  const wire = new Wire();
  const { told, hearing: heard } = hearing();
  await subscribe("j", heard, using(wire));
  await pass(LASTS_S + 5);
  assert.deepEqual([told, wire.open], [["open", "failed the server does not respond"], false]);
  wire.refuse("expired");
  assert.equal(told.length, 2);
});
