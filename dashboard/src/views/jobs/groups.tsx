// Jobs or sweeps counted by a property: how many, and in which states. A click shows those of a group.

import type { JSX } from "preact";
import { useAfter, useAsked, useKeyNames } from "../../hooks.ts";
import { counted } from "../../lib/words.ts";
import { Empty, Said, Table, type Column } from "../../parts.tsx";
import type { Label } from "../../lib/jobs/view.ts";

const LOOK_S = 5;

export type Many = "jobs" | "sweeps";

export interface Group {
  name: string;
  states: Record<string, number>;
}

export function countIn({ states }: Group): number {
  return Object.values(states).reduce((sum, count) => sum + count, 0);
}

interface Props {
  of: Many;
  by: Label[0];
  filter: string;
  waitMs: number;
  choose: (label: Label) => void;
}

export function Groups({ of, by, filter, waitMs, choose }: Props): JSX.Element {
  const path = `/v1/${of}/groups?by=${by}${filter}`;
  const { value, problem } = useAsked<{ groups: Group[] }>(useAfter(waitMs) ? path : null, LOOK_S);
  const keyName = useKeyNames();
  if (!value) return problem ? <Said problem={problem} /> : <Empty>Loading…</Empty>;
  if (!value.groups.length) return <Empty>No {of.slice(0, -1)} matches the filters; remove one of them above.</Empty>;
  const columns: Column<Group>[] = [
    [
      by,
      ({ name }) =>
        name ? (
          <button class="chip" onClick={() => choose([by, name])}>
            {by === "owner" ? keyName(name) : name}
          </button>
        ) : (
          <span class="dim">none</span>
        ),
    ],
    [of === "jobs" ? "Jobs" : "Sweeps", countIn],
    ["States", ({ states }) => Object.entries(states).map(([state, count]) => `${count} ${state}`).join(", ")],
  ];
  return (
    <>
      <Said problem={problem} />
      <Table of={columns} rows={value.groups} by={(one) => one.name} look="card groups" />
      <p class="dim count">{counted(value.groups.length, "group")}</p>
    </>
  );
}
