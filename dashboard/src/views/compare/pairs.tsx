// The newest evaluation episodes of two runs, or of two policies, on the same rows, side by side.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked } from "../../hooks.ts";
import { job as path } from "../../lib/api.ts";
import type { Run } from "../../lib/compare/compare.ts";
import { chosenSides, pairs, sidesOf, type Side } from "../../lib/compare/pairs.ts";
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
  /** What the address says: `pair` (two of JOB or JOB~POLICY), `open` and `differing`. */
  query: URLSearchParams;
  change: (name: string, value: string) => void;
}

export function Pairs({ runs, query, change }: Props): JSX.Element | null {
  const all = sidesOf(runs);
  const chosen = chosenSides(all, query.get("pair") ?? "");
  if (!chosen) return null;
  const [left, right] = chosen;
  const open = query.has("open");
  const names = all.map(({ at, text }): [string, string] => [at, text]);
  return (
    <details class="card pairs" open={open} onToggle={(event) => event.currentTarget.open !== open && change("open", event.currentTarget.open ? "1" : "")}>
      <summary>Evaluation episodes on the same rows, side by side</summary>
      <div class="bar">
        <Select label="Left" value={left.at} of={names} choose={(at) => change("pair", `${at},${right.at}`)} />
        <Select label="Right" value={right.at} of={names} choose={(at) => change("pair", `${left.at},${at}`)} />
      </div>
      {open && <Both key={`${left.at} ${right.at}`} left={left} right={right} differing={query.has("differing")} setDiffering={(on) => change("differing", on ? "1" : "")} />}
    </details>
  );
}

interface BothProps {
  left: Side;
  right: Side;
  differing: boolean;
  setDiffering: (on: boolean) => void;
}

function transcriptsOf({ job, policy }: Side): string {
  return path(job, `/transcripts${policy && `?policy=${encodeURIComponent(policy)}`}`);
}

function Both({ left, right, differing, setDiffering }: BothProps): JSX.Element {
  const [one, other] = [useAsked<Answer>(transcriptsOf(left)), useAsked<Answer>(transcriptsOf(right))];
  const [most, setMost] = useState(FIRST);
  if (!one.value || !other.value) return <Said problem={one.problem ?? other.problem} />;
  const all = pairs(one.value.transcripts, other.value.transcripts);
  const shown = differing ? all.filter(([a, b]) => a.reward !== b.reward) : all;
  if (!all.length) return <p class="dim">These two runs have no evaluation episode on the same row and against the same opponent. Choose other runs, or evaluate both on the same rows: [validation] in the spec, or opentinker eval.</p>;
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
                {played.opponent && <span class="dim"> against {played.opponent}</span>}
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
