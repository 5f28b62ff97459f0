// The list of jobs, read anew every few seconds as far as it has been loaded.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { ask, Problem } from "../../lib/api.ts";
import { anew, extended, MOST, PAGE, type Listed } from "../../lib/jobs/listed.ts";

type Deed = "anew" | "next" | "rest";

export interface UsedList {
  listed: Listed | null;
  problem: Problem | null;
  /** While the next page is read, or all of them. */
  isReading: boolean;
  /** Reads the next page. */
  next: () => void;
  /** Reads all pages to the end. */
  rest: () => void;
  /** Reads all loaded pages at once. */
  again: () => void;
}

/** Jobs by `filter`, read every so many seconds for each thousand that are loaded; null: not yet. */
export function useListed(filter: string | null, everyS: number): UsedList {
  const [state, set] = useState<{ listed: Listed | null; problem: Problem | null; isReading: boolean }>({ listed: null, problem: null, isReading: false });
  const read = useRef((_deed: Deed): void => {});
  useEffect(() => {
    if (filter === null) return;
    const stop = new AbortController();
    const waiting = new Set<Deed>();
    let [listed, timer, isBusy]: [Listed | null, number, boolean] = [null, 0, false];
    const look = async (): Promise<void> => {
      const deed = (["anew", "next", "rest"] as const).find((one) => waiting.has(one))!;
      waiting.delete(deed);
      try {
        if (listed && deed === "anew") listed = await anew(listed, filter, { signal: stop.signal });
        else listed = await extended(listed, filter, { signal: stop.signal }, ask, deed === "rest" ? MOST : PAGE);
        if (deed === "rest" && listed.more) waiting.add("rest");
        if (!stop.signal.aborted) set({ listed, problem: null, isReading: waiting.has("next") || waiting.has("rest") });
      } catch (error) {
        if (stop.signal.aborted) return;
        waiting.delete("rest");
        const problem = error instanceof Problem ? error : new Problem(0, String(error));
        set({ listed, problem, isReading: false });
        if (problem.status === 401) window.dispatchEvent(new Event("key-refused"));
        if ([401, 403, 404].includes(problem.status)) stop.abort();
      }
    };
    const work = async (): Promise<void> => {
      clearTimeout(timer);
      if (isBusy) return;
      isBusy = true;
      while (waiting.size && !stop.signal.aborted) await look();
      isBusy = false;
      const thousands = Math.max(1, Math.ceil((listed?.jobs.length ?? 0) / MOST));
      if (!stop.signal.aborted) timer = window.setTimeout(() => read.current("anew"), everyS * thousands * 1000);
    };
    read.current = (deed) => {
      waiting.add(deed);
      if (deed !== "anew") set((before) => ({ ...before, isReading: true }));
      void work();
    };
    read.current("anew");
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [filter, everyS]);
  const doing = (deed: Deed): (() => void) => useCallback(() => read.current(deed), []);
  return { ...state, next: doing("next"), rest: doing("rest"), again: doing("anew") };
}
