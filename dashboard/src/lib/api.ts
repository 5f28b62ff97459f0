// Requests to the scheduler, with the session of this browser: a cookie that no script can read. What changes something also bears
// the session's CSRF token. The key of a share link, which its address shows anyway, stays in this tab and goes before the session.

import type { Json } from "./types.ts";

const STORED = "opentinker-share";
let csrf = "";

export interface Login {
  auth: string;
  csrf: string | null;
  /** Where people sign in without a key. */
  provider: { name: string; address: string } | null;
  /** Why the last sign-in there failed. */
  problem: string | null;
}

export function shareKey(): string {
  return sessionStorage.getItem(STORED) ?? "";
}

export function keepShareKey(text: string): void {
  if (text) sessionStorage.setItem(STORED, text);
  else sessionStorage.removeItem(STORED);
}

/** How to sign in, and whether this browser has. */
export async function login(): Promise<Login> {
  const found = await ask<Login>("/v1/login");
  csrf = found.csrf ?? "";
  return found;
}

/** Makes a session with a key, which is not kept. */
export async function signIn(key: string): Promise<void> {
  await ask("/v1/session", { method: "POST", headers: { Authorization: `Bearer ${key}` } });
}

export async function signOut(): Promise<void> {
  if (shareKey()) return keepShareKey("");
  await ask("/v1/session", { method: "DELETE" });
}

/** What shows who asks; cookies are added by the browser. */
export function credentials(method: string): Record<string, string> {
  if (shareKey()) return { Authorization: `Bearer ${shareKey()}` };
  return csrf && method !== "GET" ? { "X-CSRF-Token": csrf } : {};
}

/** What the server refused, with its hint (application/problem+json). `status` 0: it did not answer. */
export class Problem extends Error {
  readonly status: number;
  readonly hint: string;
  readonly mistakes: { field: string; value: unknown; problem: string }[];

  constructor(status: number, detail: string, hint = "", mistakes: Problem["mistakes"] = []) {
    super(detail);
    this.status = status;
    this.hint = hint;
    this.mistakes = mistakes;
  }
}

/** For an Idempotency-Key: who asks again with it makes nothing twice. (`crypto.randomUUID` is not there over plain HTTP.) */
export function onceKey(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export interface Asking {
  method?: string;
  body?: Json;
  /** A body that is sent as it is; `headers` has its media type. */
  text?: string;
  headers?: Record<string, string>;
  signal?: AbortSignal;
}

export async function fetched(path: string, asking: Asking = {}): Promise<Response> {
  const method = asking.method ?? "GET";
  const headers: Record<string, string> = { ...credentials(method), ...asking.headers };
  const request: RequestInit = { method, headers, cache: "no-store", credentials: "same-origin" };
  if (asking.body !== undefined) {
    headers["Content-Type"] = "application/json";
    request.body = JSON.stringify(asking.body);
  }
  if (asking.text !== undefined) request.body = asking.text;
  if (asking.signal) request.signal = asking.signal;
  let response: Response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (asking.signal?.aborted) throw error;
    throw new Problem(0, "the server does not respond");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

export async function ask<T>(path: string, asking: Asking = {}): Promise<T> {
  return (await (await fetched(path, asking)).json()) as T;
}

async function problemOf(response: Response): Promise<Problem> {
  try {
    const said = await response.json();
    if (said.error) return new Problem(response.status, String(said.error.message));
    return new Problem(response.status, String(said.detail), String(said.hint ?? ""), said.errors ?? []);
  } catch {
    return new Problem(response.status, `${response.status} ${response.statusText}`);
  }
}

/** Server-sent data of a response, as it comes. */
export async function* events(response: Response): AsyncGenerator<string> {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

export function job(id: string, rest = ""): string {
  return `/v1/jobs/${encodeURIComponent(id)}${rest}`;
}
