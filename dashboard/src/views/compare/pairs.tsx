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

export function Pairs({ runs }: { runs: Run[] }): JSX.Element | null {
  const [chosen, choose] = useState<[string, string] | null>(null);
  const [open, setOpen] = useState(false);
  if (runs.length < 2) return null;
  const [left, right] = chosen ?? [runs[0]!.id, runs[1]!.id];
  const names = runs.map((run): [string, string] => [run.id, `${run.name} ${run.id}`]);
  return (
    <details class="card pairs" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Evaluation episodes on the same rows, side by side</summary>
      <div class="bar">
        <Select label="Left" value={left} of={names} choose={(id) => choose([id, right])} />
        <Select label="Right" value={right} of={names} choose={(id) => choose([left, id])} />
      </div>
      {open && <Both key={`${left} ${right}`} left={left} right={right} />}
    </details>
  );
}

function Both({ left, right }: { left: string; right: string }): JSX.Element {
  const [one, other] = [useAsked<Answer>(path(left, "/transcripts")), useAsked<Answer>(path(right, "/transcripts"))];
  const [differing, setDiffering] = useState(false);
  const [most, setMost] = useState(FIRST);
  if (!one.value || !other.value) return <Said problem={one.problem ?? other.problem} />;
  const all = pairs(one.value.transcripts, other.value.transcripts);
  const shown = differing ? all.filter(([a, b]) => a.reward !== b.reward) : all;
  if (!all.length) return <p class="dim">They have no evaluation episode with the same beginning ([validation] in the spec, or eval jobs).</p>;
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
