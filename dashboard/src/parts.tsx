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

/** How far one policy is. */
export function Share({ policy, step, steps }: { policy: string; step: number; steps: number }): JSX.Element {
  return (
    <span class="progress" data-policy={policy}>
      <small class="dim">{policy}</small>
      <progress value={steps ? Math.min(1, step / steps) : 0} max={1} aria-label={`progress of ${policy}`} />
      <small>
        {step}
        {steps ? ` / ${steps}` : ""}
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

interface ChoiceProps {
  label: string;
  value: string;
  of: string[];
  say?: (text: string) => string;
  choose: (text: string) => void;
}

/** One of several, by buttons. */
export function Choice({ label, value, of, say, choose }: ChoiceProps): JSX.Element {
  return (
    <span class="choice" role="group" aria-label={label}>
      <small class="dim">{label}</small>
      {of.map((one) => (
        <button key={one} aria-pressed={one === value} onClick={() => choose(one)}>
          {say ? say(one) : one}
        </button>
      ))}
    </span>
  );
}
