// The newest evaluation episodes of two runs on the same rows, side by side.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked } from "../../hooks.ts";
import { job as path } from "../../lib/api.ts";
import type { Run } from "../../lib/compare/compare.ts";
import { pairs } from "../../lib/compare/pairs.ts";
import { counted, short } from "../../lib/words.ts";
import { Said, Select } from "../../parts.tsx";
import type { Exam } from "../job/episodes.tsx";
import { Talk } from "../job/match.tsx";

const FIRST = 10;

interface Answer {
  step: number | null;
  transcripts: Exam[];
}

interface Props {
  runs: Run[];
  /** What the address says: `pair` (two ids), `open` and `differing`. */
  query: URLSearchParams;
  change: (name: string, value: string) => void;
}

export function Pairs({ runs, query, change }: Props): JSX.Element | null {
  if (runs.length < 2) return null;
  const given = (query.get("pair") ?? "").split(",");
  const has = (id: string | undefined): id is string => runs.some((run) => run.id === id);
  const left = has(given[0]) ? given[0] : runs[0]!.id;
  const right = has(given[1]) ? given[1] : runs[1]!.id;
  const open = query.has("open");
  const names = runs.map((run): [string, string] => [run.id, `${run.name} ${run.id}`]);
  return (
    <details class="card pairs" open={open} onToggle={(event) => event.currentTarget.open !== open && change("open", event.currentTarget.open ? "1" : "")}>
      <summary>Evaluation episodes on the same rows, side by side</summary>
      <div class="bar">
        <Select label="Left" value={left} of={names} choose={(id) => change("pair", `${id},${right}`)} />
        <Select label="Right" value={right} of={names} choose={(id) => change("pair", `${left},${id}`)} />
      </div>
      {open && <Both key={`${left} ${right}`} left={left} right={right} differing={query.has("differing")} setDiffering={(on) => change("differing", on ? "1" : "")} />}
    </details>
  );
}

interface BothProps {
  left: string;
  right: string;
  differing: boolean;
  setDiffering: (on: boolean) => void;
}

function Both({ left, right, differing, setDiffering }: BothProps): JSX.Element {
  const [one, other] = [useAsked<Answer>(path(left, "/transcripts")), useAsked<Answer>(path(right, "/transcripts"))];
  const [most, setMost] = useState(FIRST);
  if (!one.value || !other.value) return <Said problem={one.problem ?? other.problem} />;
  const all = pairs(one.value.transcripts, other.value.transcripts);
  const shown = differing ? all.filter(([a, b]) => a.reward !== b.reward) : all;
  if (!all.length) return <p class="dim">No evaluation episode of one begins like one of the other. Choose other runs, or evaluate both on the same rows: [validation] in the spec, or opentinker eval.</p>;
  return (
    <>
      <p class="dim">
        {counted(shown.length, "row")}; step {one.value.step} and step {other.value.step}.{" "}
        <label class="check">
          <input type="checkbox" checked={differing} onChange={(event) => setDiffering(event.currentTarget.checked)} /> only where the rewards differ
        </label>
      </p>
      {shown.slice(0, most).map((pair) => (
        <div key={pair[0].index} class="pair-of">
          {pair.map((played, side) => (
            <div key={side}>
              <small>
                reward <b>{short(played.reward)}</b> <span class="dim">{played.ending}</span>
              </small>
              <Talk messages={played.messages} images={played.images} />
            </div>
          ))}
        </div>
      ))}
      {shown.length > most && <button onClick={() => setMost(most + FIRST)}>More rows</button>}
    </>
  );
}
