// The list of jobs, read anew every few seconds as far as it has been loaded.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { Problem } from "../../lib/api.ts";
import { anew, extended, MOST, type Listed } from "../../lib/jobs/listed.ts";

type Deed = "anew" | "next";

export interface UsedList {
  listed: Listed | null;
  problem: Problem | null;
  /** While the next page is read. */
  isReading: boolean;
  /** Reads the next page. */
  next: () => void;
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
      const deed: Deed = waiting.has("anew") ? "anew" : "next";
      waiting.delete(deed);
      try {
        listed = listed && deed === "anew" ? await anew(listed, filter, { signal: stop.signal }) : await extended(listed, filter, { signal: stop.signal });
        if (!stop.signal.aborted) set({ listed, problem: null, isReading: waiting.has("next") });
      } catch (error) {
        if (stop.signal.aborted) return;
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
      if (deed === "next") set((before) => ({ ...before, isReading: true }));
      void work();
    };
    read.current("anew");
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [filter, everyS]);
  return { ...state, next: useCallback(() => read.current("next"), []), again: useCallback(() => read.current("anew"), []) };
}
