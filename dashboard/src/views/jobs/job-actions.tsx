// What is done with all jobs that are chosen in the list.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked, useDoing, useMay } from "../../hooks.ts";
import { ask, job as pathOf, Problem } from "../../lib/api.ts";
import { FINAL, type Job, type Json } from "../../lib/types.ts";
import { counted } from "../../lib/words.ts";
import { Said } from "../../parts.tsx";

const KEYS = { tag: "t", cancel: "s", delete: "d" };

/** Does what a key of the list means for the selected jobs: presses the button, or goes to the field. */
export function pressed(deed: keyof typeof KEYS): void {
  const control = document.querySelector<HTMLElement>(`.bulk [aria-keyshortcuts="${KEYS[deed]}"]`);
  if (deed === "tag") control?.focus();
  else control?.click();
}

/** Filters count this many jobs, the newest. */
const MOST_COUNTED = 10_000;

/** What a list has beyond the jobs that are loaded. */
export interface Rest {
  filter: string;
  isReading: boolean;
  /** Loads it. */
  rest: () => void;
}

interface BulkProps {
  jobs: Job[];
  /** If all loaded jobs are selected and the list goes on. */
  unloaded: Rest | null;
  /** Chooses all that the list has. */
  whole: () => void;
  compare: () => void;
  /** Chooses none, or these alone. */
  clear: (but?: string[]) => void;
  again: () => void;
}

export function Bulk({ jobs, unloaded, whole, compare, clear, again }: BulkProps): JSX.Element {
  const { doing, problem, act } = useDoing();
  const [mayChange, mayDelete] = [useMay("jobs:write"), useMay("checkpoints:write")];
  const [tag, setTag] = useState("");
  const active = jobs.filter((job) => !FINAL.includes(job.state));
  const over = jobs.filter((job) => FINAL.includes(job.state));
  const each = (some: Job[], method: string, rest: string, body?: Json): void =>
    act(async () => {
      const refused: [string, Problem][] = [];
      for (const { id } of some) {
        try {
          await ask(pathOf(id, rest), { method, ...(body === undefined ? {} : { body }) });
        } catch (error) {
          if (!(error instanceof Problem)) throw error;
          refused.push([id, error]);
        }
      }
      clear(refused.map(([id]) => id));
      again();
      const [first] = refused;
      if (first) throw new Problem(first[1].status, `${refused.length} of ${some.length} refused and still selected: ${first[1].message}`);
    });
  const sure = (what: string, some: Job[]): boolean => confirm(`${what} ${counted(some.length, "job")}?\n${some.map((job) => job.name).slice(0, 10).join("\n")}`);
  return (
    <div class="bar bulk" role="toolbar" aria-label="Selected jobs">
      <b>{counted(jobs.length, "job")} selected</b>
      {unloaded && <Unloaded of={unloaded} whole={whole} />}
      <button aria-keyshortcuts="c" onClick={compare}>
        Compare
      </button>
      {mayChange && (
        <>
          <button aria-keyshortcuts={KEYS.cancel} disabled={doing || !active.length} onClick={() => sure("Cancel", active) && each(active, "POST", "/cancel")}>
            Cancel
          </button>
          <form
            onSubmit={(event) => {
              event.preventDefault();
              if (tag.trim()) each(jobs, "PATCH", "", { add_tags: [tag.trim()] });
              setTag("");
            }}
          >
            <input aria-label="Tag to add" aria-keyshortcuts={KEYS.tag} placeholder="Tag…" maxLength={50} value={tag} onInput={(event) => setTag(event.currentTarget.value)} />
          </form>
        </>
      )}
      {mayDelete && (
        <button
          aria-keyshortcuts={KEYS.delete}
          disabled={doing || !over.length}
          title="Checkpoints, metrics and logs of ended jobs; their records stay"
          onClick={() => sure("Delete the artifacts of", over) && each(over, "DELETE", "/artifacts")}
        >
          Delete artifacts
        </button>
      )}
      <button class="plain" onClick={() => clear()}>
        None
      </button>
      <Said problem={problem} />
    </div>
  );
}

/** Says that jobs which are not loaded are not selected either, and offers to select them too. */
function Unloaded({ of, whole }: { of: Rest; whole: () => void }): JSX.Element {
  const query = new URLSearchParams(of.filter);
  query.delete("sort"); // counts have no order
  query.set("by", "state");
  const { value } = useAsked<{ groups: { jobs: number }[] }>(`/v1/jobs/groups?${query}`);
  const total = value?.groups.reduce((sum, group) => sum + group.jobs, 0);
  if (total === undefined) return <small class="dim">all that are loaded</small>;
  if (total >= MOST_COUNTED) return <small class="dim">all that are loaded, of {MOST_COUNTED.toLocaleString("en")} or more; scroll down to load more</small>;
  return (
    <>
      <small class="dim">all that are loaded, of {total.toLocaleString("en")}</small>
      <button disabled={of.isReading} onClick={whole}>
        {of.isReading ? "Loading…" : `Select all ${total.toLocaleString("en")}`}
      </button>
    </>
  );
}
