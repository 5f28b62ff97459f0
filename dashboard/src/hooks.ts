// What views share: who we are, where we are, answers that are asked for again, a job that is followed.

import { createContext } from "preact";
import { useCallback, useContext, useEffect, useReducer, useRef, useState } from "preact/hooks";
import { ask, Problem, type Asking } from "./lib/api.ts";
import { isTyping, placeOf } from "./lib/jobs/rows.ts";
import { Follow, type Beside } from "./lib/live/follow.ts";
import type { Me } from "./lib/types.ts";

export const Who = createContext<Me>({ tenant: "", role: "", key: null, user: null, scopes: [], jobs: [] });

/** Whether whoever looks may do this. */
export function useMay(action: string): boolean {
  return useContext(Who).scopes.includes(action);
}

/** The address behind the #, in parts. */
export function useAddress(): string[] {
  const [address, set] = useState(location.hash);
  useEffect(() => {
    const changed = (): void => set(location.hash);
    window.addEventListener("hashchange", changed);
    changed(); // it may have changed since this was drawn
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return address.split("?", 1)[0]!.replace(/^#\/?/, "").split("/").filter(Boolean).map(decoded);
}

/** What stands behind a "?" in the address. */
export function queryNow(): string {
  return location.hash.split("?").slice(1).join("?");
}

/** That, and a function that replaces it: no step for the browser's Back. */
export function useQuery(): [string, (query: string) => void] {
  const [query, set] = useState(queryNow);
  useEffect(() => {
    const changed = (): void => set(queryNow());
    window.addEventListener("hashchange", changed);
    changed();
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  const replace = useCallback((next: string): void => {
    const address = location.hash.split("?", 1)[0] || "#/";
    history.replaceState(history.state, "", next ? `${address}?${next}` : address);
    set(next);
  }, []);
  return [query, replace];
}

/** `g` and then a letter goes to a view. */
export function useGoKeys(): void {
  useEffect(() => {
    let before = "";
    const pressed = (event: KeyboardEvent): void => {
      if (isTyping(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
      const place = placeOf(before, event.key);
      before = place ? "" : event.key;
      if (!place) return;
      event.preventDefault();
      event.stopImmediatePropagation(); // the view's own keys mean something else
      go(...place);
    };
    window.addEventListener("keydown", pressed, true);
    return () => window.removeEventListener("keydown", pressed, true);
  }, []);
}

/** A part of an address that somebody typed may be no encoded text. */
function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function go(...parts: string[]): void {
  location.hash = `/${parts.map(encodeURIComponent).join("/")}`;
}

export interface Asked<T> {
  value: T | null;
  problem: Problem | null;
  /** Ask at once. */
  again: () => void;
}

/** GET `path` now and every so many seconds (0: once); null: nothing is asked. The last answer stays while there is none.
 * `get` reads the answer, if not as JSON; always the same function. */
export function useAsked<T>(path: string | null, everyS = 0, get: (path: string, asking: Asking) => Promise<T> = ask): Asked<T> {
  const [state, set] = useState<{ path: string | null; value: T | null; problem: Problem | null }>({ path, value: null, problem: null });
  const [turn, again] = useReducer((n: number) => n + 1, 0);
  useEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    let timer = 0;
    const look = async (): Promise<void> => {
      try {
        const value = await get(path, { signal: stop.signal });
        if (stop.signal.aborted) return;
        set({ path, value, problem: null });
      } catch (error) {
        if (stop.signal.aborted) return;
        const problem = error instanceof Problem ? error : new Problem(0, String(error));
        set((before) => ({ path, value: before.path === path ? before.value : null, problem }));
        if (problem.status === 401) window.dispatchEvent(new Event("key-refused"));
        if ([401, 403, 404].includes(problem.status)) return;
      }
      if (everyS) timer = window.setTimeout(() => void look(), everyS * 1000);
    };
    void look();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [path, everyS, turn]);
  const here = state.path === path;
  const soon = useCallback(() => again(undefined), []);
  return { value: here ? state.value : null, problem: here ? state.problem : null, again: soon };
}

/** Longer than between two keys of a word. */
const TYPING_MS = 200;
const DRAW_MS = 400;
const KEYS_S = 60;
const BESIDE: Beside[] = ["logs", "events", "rollouts", "timeline"];

/** A job's metrics, drawn anew a few times a second while they change. */
export function useFollow(job: string | null): Follow | null {
  const [follow, set] = useState<Follow | null>(null);
  const [, draw] = useReducer((n: number) => n + 1, 0);
  useEffect(() => {
    if (job === null) return;
    const made = new Follow(job, BESIDE);
    set(made);
    let timer = 0;
    const stop = made.watch(() => {
      timer ||= window.setTimeout(() => {
        timer = 0;
        draw(undefined);
      }, DRAW_MS);
    });
    return () => {
      stop();
      clearTimeout(timer);
      made.close();
    };
  }, [job]);
  return follow?.job === job ? follow : null;
}

/** Does something soon after the job has said one of these, once for many at a time. */
export function useHeard(follow: Follow | null, names: Beside[], act: () => void): void {
  useEffect(() => {
    let timer = 0;
    const soon = (): void => void (timer ||= window.setTimeout(() => ((timer = 0), act()), DRAW_MS));
    const stops = names.map((name) => follow?.hear(name, soon));
    return () => {
      clearTimeout(timer);
      for (const stop of stops) stop?.();
    };
  }, [follow, act]);
}

/** Seconds since 1970, anew every so many. */
export function useNow(everyS = 1): number {
  const [now, set] = useState(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => set(Date.now() / 1000), everyS * 1000);
    return () => clearInterval(timer);
  }, [everyS]);
  return now;
}

/** A value that has not changed for a while. */
export function useSettled<T>(value: T, afterMs: number): T {
  const [settled, set] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => set(value), afterMs);
    return () => clearTimeout(timer);
  }, [value, afterMs]);
  return settled;
}

/** How long a list waits before it asks for what its filter finds: not at all after a pause, and else until whoever types
 * makes one. */
export function useTypingWait(filter: string): number {
  const last = useRef({ filter, at: -Infinity, waitMs: 0 });
  if (last.current.filter !== filter) {
    const at = performance.now();
    last.current = { filter, at, waitMs: at - last.current.at < TYPING_MS ? TYPING_MS : 0 };
  }
  return last.current.waitMs;
}

/** Whether this was drawn first so long ago. */
export function useAfter(ms: number): boolean {
  const [is, set] = useState(ms === 0);
  useEffect(() => {
    const timer = setTimeout(() => set(true), ms);
    return () => clearTimeout(timer);
  }, []);
  return is;
}

/** Whether an owner is an API key, not a user. */
export function isKey(owner: string): boolean {
  return /^[a-z0-9]{10}$/.test(owner);
}

/** Says a key as people know it: by its name, where whoever looks may see the tenant's keys. */
export function useKeyNames(): (id: string) => string {
  const { value } = useAsked<{ keys: { id: string; name: string }[] }>(useMay("keys:read") ? "/v1/keys" : null, KEYS_S);
  return (id) => {
    const name = value?.keys.find((one) => one.id === id)?.name;
    return name ? `${name} (${id})` : id;
  };
}

/** What a click does that may be refused. */
export function useDoing(): { doing: boolean; problem: Problem | null; act: (what: () => Promise<void>) => void } {
  const [doing, setDoing] = useState(false);
  const [problem, setProblem] = useState<Problem | null>(null);
  const act = (what: () => Promise<void>): void => {
    setDoing(true);
    setProblem(null);
    what()
      .catch((error: unknown) => setProblem(error instanceof Problem ? error : new Problem(0, String(error))))
      .finally(() => setDoing(false));
  };
  return { doing, problem, act };
}
