// Where a job's last minutes went, and what to change.

import type { JSX } from "preact";
import { useAsked } from "../../hooks.ts";
import { job as path } from "../../lib/api.ts";
import { FINAL, type JobDetail } from "../../lib/types.ts";
import { duration } from "../../lib/words.ts";
import { Said } from "../../parts.tsx";

const LOOK_S = 10;
/** A worker that has done nothing for the job for so long is named. */
const SILENT_S = 10;

/** Causes whose names say little to people who do not know the services. */
const WORDS: Record<string, string> = {
  nothing: "no worker was working on it",
  swap: "loading new weights",
  checkpoint: "saving checkpoints",
  reference: "frozen models",
  loading: "loading models",
};

interface Diagnosis {
  since: number;
  until: number;
  causes: { cause: string; seconds: number }[];
  /** Absent from servers of earlier releases, of which one may answer during an upgrade. */
  waits?: { worker: string; what: string; seconds: number }[];
  silent: { worker: string; seconds: number }[];
  findings: { what: string; advice: string }[];
}

export function Why({ job }: { job: JobDetail }): JSX.Element {
  const { value, problem } = useAsked<Diagnosis>(path(job.id, "/why"), FINAL.includes(job.state) ? 0 : LOOK_S);
  if (!value) return <Said problem={problem} />;
  const whole = value.until - value.since || 1;
  const silent = value.silent.filter(({ seconds }) => seconds >= SILENT_S);
  return (
    <section class="card why" aria-label="Where the time goes">
      <h2>
        Where the time goes <small class="dim">the last {duration(whole)}</small>
      </h2>
      <table>
        <tbody>
          {value.causes.map(({ cause, seconds }) => (
            <tr key={cause}>
              <td>{WORDS[cause] ?? cause}</td>
              <td>
                <meter min={0} max={whole} value={seconds} aria-label={WORDS[cause] ?? cause} />
              </td>
              <td>{Math.round((100 * seconds) / whole)} %</td>
            </tr>
          ))}
        </tbody>
      </table>
      {value.waits && value.waits.length > 0 && (
        <p class="dim">Waiting: {value.waits.map(({ worker, what, seconds }) => `${worker} for ${what}, for ${duration(seconds)}`).join("; ")}</p>
      )}
      {silent.length > 0 && <p class="dim">Silent: {silent.map(({ worker, seconds }) => `${worker} for ${duration(seconds)}`).join(", ")}</p>}
      {value.findings.map(({ what, advice }) => (
        <p key={what}>
          <b>{what}</b>
          <br />
          {advice}
        </p>
      ))}
    </section>
  );
}
