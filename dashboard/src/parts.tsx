// Small things that every view is made of.

import type { ComponentChildren, JSX } from "preact";
import type { Problem } from "./lib/api.ts";
import { FINAL } from "./lib/types.ts";

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

/** Names of a table's columns. */
export function Head({ of }: { of: string[] }): JSX.Element {
  return (
    <thead>
      <tr>
        {of.map((name) => (
          <th key={name}>{name}</th>
        ))}
      </tr>
    </thead>
  );
}

interface ProgressProps {
  step: number;
  steps: number;
  /** Of a job. */
  state?: string;
  /** Of one policy of it. */
  policy?: string;
}

export function Progress({ step, steps, state = "", policy }: ProgressProps): JSX.Element {
  const share = state === "succeeded" ? 1 : steps ? Math.min(1, step / steps) : 0;
  return (
    <span class="progress" data-policy={policy}>
      {policy && <small class="dim">{policy}</small>}
      <progress class={FINAL.includes(state) ? state : ""} value={share} max={1} aria-label={policy ? `progress of ${policy}` : "progress"} />
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

interface SelectProps {
  label: string;
  value: string;
  /** Values and their texts. */
  of: readonly (readonly [string, string])[];
  choose: (value: string) => void;
  disabled?: boolean;
}

export function Select({ label, value, of, choose, disabled }: SelectProps): JSX.Element {
  return (
    <select aria-label={label} value={value} disabled={disabled} onChange={(event) => choose(event.currentTarget.value)}>
      {of.map(([one, text]) => (
        <option key={one} value={one}>
          {text}
        </option>
      ))}
    </select>
  );
}

interface ChoiceProps<T> {
  label: string;
  /** The label is only read out. */
  quiet?: boolean;
  value: T;
  of: readonly T[];
  say?: (one: T) => string;
  choose: (one: T) => void;
}

/** One of several, by buttons. */
export function Choice<T extends string | number>({ label, quiet, value, of, say, choose }: ChoiceProps<T>): JSX.Element {
  return (
    <span class="choice" role="group" aria-label={label}>
      {!quiet && <small class="dim">{label}</small>}
      {of.map((one) => (
        <button key={one} aria-pressed={one === value} onClick={() => choose(one)}>
          {say ? say(one) : one}
        </button>
      ))}
    </span>
  );
}
