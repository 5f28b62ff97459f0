// Small things that every view is made of.

import type { ComponentChildren, JSX } from "preact";
import type { Problem } from "./lib/api.ts";
import { FINAL, type Job } from "./lib/types.ts";

export function State({ state }: { state: string }): JSX.Element {
  return <span class={`state ${state}`}>{state}</span>;
}

export function Said({ problem }: { problem: Problem | null }): JSX.Element | null {
  if (!problem) return null;
  return (
    <div class="problem" role="alert">
      <p>{problem.message}</p>
      {problem.mistakes.length > 0 && (
        <ul>
          {problem.mistakes.map((one) => (
            <li key={`${one.field}${one.problem}`}>
              <code>{one.field}</code> {one.problem}
            </li>
          ))}
        </ul>
      )}
      {problem.hint && <p class="dim">{problem.hint}</p>}
    </div>
  );
}

export function Empty({ children }: { children: ComponentChildren }): JSX.Element {
  return <p class="empty">{children}</p>;
}

export function Progress({ job }: { job: Job }): JSX.Element {
  const share = job.state === "succeeded" ? 1 : job.steps ? Math.min(1, job.step / job.steps) : 0;
  return (
    <span class="progress">
      <progress class={FINAL.includes(job.state) ? job.state : ""} value={share} max={1} aria-label="progress" />
      <small>
        {job.step}
        {job.steps ? ` / ${job.steps}` : ""}
      </small>
    </span>
  );
}

export function Facts({ of }: { of: [string, ComponentChildren][] }): JSX.Element {
  return (
    <dl class="facts">
      {of.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
