// A job's metrics from its first point to the one that comes next: history over HTTP, live over NATS, joined.
//
//   live     consumes points of the job's subject; a gap, or a new connection, asks for `refill`
//   refill   consumes pages of history above the cursor, until no point is missing or nobody has it
//   poll     refills every POLL_MS while there is no live stream, and says why

import { ask, job as path, Problem } from "../api.ts";
import { Joined } from "./join.ts";
import type { Hearing, Subscription } from "./live.ts";
import { Refill } from "./refill.ts";
import type { Point } from "../types.ts";

const PAGE = 5000;
const POLL_MS = 2000;
const AGAIN_MS = 15_000;

export type Beside = "logs" | "events" | "rollouts" | "timeline";
type Subscribe = (job: string, hearing: Hearing) => Promise<Subscription>;
export type Way = "loading" | "live" | "joining" | "polling" | "ended";

/** Larger than the page: what is seen first does not wait for it. */
const imported = async (): Promise<Subscribe> => (await import("./live.ts")).subscribe;

export class Follow {
  readonly joined = new Joined();
  way: Way = "loading";
  /** Why it is not live, or what is being done about a gap. */
  said = "";
  private cursor = 0;
  private closed = false;
  private readonly history: Refill;
  private live: Subscription | null = null;
  private timer = 0;
  /** Counts tries to hear it live, and their ends: what an earlier one says changes nothing. */
  private turn = 0;
  private readonly listeners = new Set<() => void>();
  private readonly hearers = new Map<Beside, Set<(noun: unknown) => void>>();
  readonly job: string;
  private readonly subscribing: () => Promise<Subscribe>;

  /** `beside`: what else of the job is heard over the same connection. */
  constructor(job: string, beside: readonly Beside[] = [], subscribing = imported) {
    this.job = job;
    this.subscribing = subscribing;
    this.history = new Refill(
      this.joined,
      () => this.read(),
      (missing, problem) => this.note(problem || (missing ? `fetching ${missing} missing points` : "")),
    );
    for (const name of beside) this.hearers.set(name, new Set());
    void this.begin();
  }

  /** Live alone: what came before has its own route. */
  hear(name: Beside, hearer: (noun: unknown) => void): () => void {
    this.hearers.get(name)?.add(hearer);
    return () => this.hearers.get(name)?.delete(hearer);
  }

  watch(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  close(): void {
    this.closed = true;
    this.history.close();
    this.hangUp();
  }

  /** The job is over: what there is now is all there will be. */
  end(): void {
    if (this.over) return;
    void this.history.ask().then(() => {
      if (this.over) return;
      this.hangUp();
      this.say("ended", "");
    });
  }

  private async begin(): Promise<void> {
    void this.connect();
    await this.history.ask();
  }

  private get over(): boolean {
    return this.closed || this.way === "ended";
  }

  /** Gives the turn after it. */
  private hangUp(): number {
    clearTimeout(this.timer);
    void this.live?.close();
    this.live = null;
    return (this.turn += 1);
  }

  private async connect(): Promise<void> {
    if (this.over) return;
    const turn = this.hangUp();
    try {
      const subscribe = await this.subscribing();
      const messages: Record<string, (noun: unknown) => void> = { metrics: (point) => this.heard(point as Point) };
      for (const [name, hearers] of this.hearers) messages[name] = (noun) => hearers.forEach((hearer) => hearer(noun));
      const live = await subscribe(this.job, {
        messages,
        open: () => {
          if (turn !== this.turn) return;
          this.say("live", "");
          void this.history.ask();
        },
        away: (why) => {
          if (turn === this.turn) this.say("joining", why);
        },
        failed: (why) => this.fallBack(turn, why),
      });
      if (turn === this.turn) this.live = live;
      else void live.close();
    } catch (error) {
      this.fallBack(turn, error instanceof Problem ? error.message : String(error));
    }
  }

  private fallBack(failed: number, why: string): void {
    if (failed !== this.turn) return;
    const turn = this.hangUp();
    this.say("polling", why);
    const since = Date.now();
    const poll = async (): Promise<void> => {
      if (Date.now() - since > AGAIN_MS) return await this.connect();
      await this.history.ask();
      if (turn === this.turn) this.timer = window.setTimeout(() => void poll(), POLL_MS);
    };
    this.timer = window.setTimeout(() => void poll(), POLL_MS);
  }

  private heard(point: Point): void {
    if (this.joined.add(point)) this.tell();
    if (this.way === "live" && !this.history.busy && this.joined.gaps().length) void this.history.ask();
  }

  private async read(): Promise<void> {
    for (;;) {
      const query = `?after=${this.cursor}&limit=${PAGE}`;
      const page = await ask<{ metrics: Point[]; cursor: number; more: boolean }>(path(this.job, `/metrics${query}`));
      for (const point of page.metrics) this.joined.add(point);
      this.cursor = page.cursor;
      this.tell();
      if (!page.more || this.closed) return;
    }
  }

  private say(way: Way, said: string): void {
    if (this.way === "ended") return;
    this.way = way;
    this.said = said;
    this.tell();
  }

  private note(said: string): void {
    if (this.way === "polling" && !said) return; // it goes on saying why
    this.said = said;
    this.tell();
  }

  private tell(): void {
    for (const listener of this.listeners) listener();
  }
}
