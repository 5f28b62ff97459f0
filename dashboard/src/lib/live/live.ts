// One connection that hears a job's own subjects on NATS, with credentials that last minutes and are renewed before they end.
//
// The server hands them out over HTTP (POST /v1/jobs/{id}/stream-credentials): they read this one job and nothing else.

import { wsconnect, type NatsConnection } from "@nats-io/nats-core";
import { ask, job as path } from "../api.ts";

export interface Credentials {
  servers: string[];
  token: string;
  inbox: string;
  /** Unix seconds. */
  expires_at: number;
  subjects: Record<string, string>;
}

export interface Hearing {
  /** By the name that the credentials give each subject. */
  messages: Record<string, (noun: unknown) => void>;
  /** Connected, or again: whatever was sent meanwhile was not heard. */
  open: () => void;
  away: (why: string) => void;
  /** It will not come back by itself. */
  failed: (why: string) => void;
}

export interface Subscription {
  close: () => Promise<void>;
}

const RECONNECT_MS = 500;
const REFUSALS = 20;
const CONNECT_MS = 4000;

/** Whoever was told that it failed needs not close it. What fails before this returns is thrown, and not told. */
export async function subscribe(job: string, hearing: Hearing, connect = connected): Promise<Subscription> {
  const credentials = await renewed(job);
  let begun = false;
  let closed = false;
  let now = await connect(credentials);
  let timer = 0;
  let refusal = "";

  const end = async (): Promise<void> => {
    closed = true;
    clearTimeout(timer);
    await now.close();
  };
  const fail = (why: string): void => {
    if (closed) return;
    void end();
    hearing.failed(why);
  };

  const listen = (nc: NatsConnection): void => {
    for (const [name, heard] of Object.entries(hearing.messages)) {
      const subject = credentials.subjects[name];
      if (!subject) throw new Error(`the server has no subject for ${name}`);
      nc.subscribe(subject, { callback: (error, message) => (error ? refuse(error) : heard(message.json())) });
    }
  };
  const refuse = (error: Error): void => {
    refusal ||= error.message; // it may not hear this: there is nothing to wait for
    if (begun) fail(refusal);
  };
  const guard = async (nc: NatsConnection): Promise<void> => {
    let refused = 0; // the server comes back before the scheduler, which says who may come in
    for await (const status of nc.status()) {
      if (nc !== now) continue;
      if (status.type === "disconnect") hearing.away("the message server is unreachable");
      if (status.type === "error" && (refused += 1) > REFUSALS) void nc.close();
      if (status.type === "reconnect") {
        refused = 0;
        hearing.open();
      }
    }
    const error = await nc.closed();
    if (nc === now) fail(error ? error.message : "the message server closed the connection");
  };
  const renew = async (until: number): Promise<void> => {
    let nc: NatsConnection | null = null;
    try {
      const next = await renewed(job);
      if (closed) return;
      nc = await connect(next);
      if (!closed) {
        listen(nc); // before the other is closed: what both hear is known twice, and joined
        await nc.flush();
      }
      if (closed) return void nc.close();
      const old = now;
      now = nc;
      void guard(nc);
      schedule(next.expires_at);
      void old.close();
    } catch (error) {
      void nc?.close();
      if (closed) return;
      if (Date.now() / 1000 < until - 2) timer = window.setTimeout(() => void renew(until), 2000);
      else fail(error instanceof Error ? error.message : String(error));
    }
  };
  const schedule = (until: number): void => {
    const left = until * 1000 - Date.now();
    timer = window.setTimeout(() => void renew(until), Math.max(1000, left * 0.6));
  };

  try {
    listen(now);
    await now.flush();
    if (refusal) throw new Error(refusal);
  } catch (error) {
    void end();
    throw error;
  }
  begun = true;
  void guard(now);
  schedule(credentials.expires_at);
  hearing.open();
  return { close: end };
}

async function renewed(job: string): Promise<Credentials> {
  return await ask<Credentials>(path(job, "/stream-credentials"), { method: "POST" });
}

async function connected(credentials: Credentials): Promise<NatsConnection> {
  return await wsconnect({
    servers: credentials.servers,
    token: credentials.token,
    inboxPrefix: credentials.inbox,
    timeout: CONNECT_MS,
    reconnectTimeWait: RECONNECT_MS,
    maxReconnectAttempts: -1,
    ignoreAuthErrorAbort: true,
  });
}
