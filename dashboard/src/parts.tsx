// Small things that every view is made of.

import type { ComponentChildren, HTMLAttributes, JSX } from "preact";
import type { Problem } from "./lib/api.ts";
import { FINAL } from "./lib/types.ts";
import { short } from "./lib/words.ts";

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

/** A column of a table: its name, its cell of a row, and the class of its cells. */
export type Column<T> = [name: string, cell: (row: T) => ComponentChildren, look?: string];

/** A value with its interval, where it has one. */
export interface Measured {
  value: number;
  interval: [number, number] | null;
}

/** `isBest`: of several that are compared, which alone is bold then. */
export function Bounded({ of, isBest }: { of: Measured | null | undefined; isBest?: boolean }): JSX.Element | null {
  if (!of) return null;
  return (
    <>
      {isBest ? <b title="best">{short(of.value)} ★</b> : isBest === undefined ? <b>{short(of.value)}</b> : short(of.value)}{" "}
      {of.interval && <small class="dim">{of.interval.map(short).join(" to ")}</small>}
    </>
  );
}

interface TableProps<T> {
  of: Column<T>[];
  rows: readonly T[];
  /** Tells a row from the others. */
  by: (row: T) => string | number;
  look?: string;
  label?: string;
  /** Attributes of a row. */
  row?: (row: T) => HTMLAttributes<HTMLTableRowElement>;
}

export function Table<T>({ of, rows, by, look, label, row }: TableProps<T>): JSX.Element {
  return (
    <table class={look} aria-label={label}>
      <Head of={of.map(([name]) => name)} />
      <tbody>
        {rows.map((one) => (
          <tr key={by(one)} {...row?.(one)}>
            {of.map(([name, cell, looks]) => (
              <td key={name} data-label={name} class={looks}>
                {cell(one)}
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
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

type Fact = [name: string, value: ComponentChildren];

/** Names with their values; what is falsy is left out. */
export function Facts({ of }: { of: (Fact | false | "" | 0 | null | undefined)[] }): JSX.Element {
  return (
    <dl class="facts">
      {of.map((one) =>
        one ? (
          <div key={one[0]}>
            <dt>{one[0]}</dt>
            <dd>{one[1]}</dd>
          </div>
        ) : null,
      )}
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

interface SearchProps {
  label: string;
  placeholder: string;
  value: string;
  set: (value: string) => void;
  id?: string;
}

export function Search({ label, placeholder, value, set, id }: SearchProps): JSX.Element {
  return (
    <input
      type="search"
      id={id}
      maxLength={200}
      placeholder={placeholder}
      aria-label={label}
      value={value}
      onInput={(event) => set(event.currentTarget.value)}
    />
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
