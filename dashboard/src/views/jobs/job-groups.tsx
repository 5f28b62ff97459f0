// Jobs counted by a property: how many, and in which states. A click shows those of a group.

import type { JSX } from "preact";
import { useAsked, useKeyNames } from "../../hooks.ts";
import { counted } from "../../lib/words.ts";
import { Empty, Said, Table, type Column } from "../../parts.tsx";
import type { Label } from "../../lib/jobs/view.ts";

const LOOK_S = 5;

interface Group {
  name: string;
  jobs: number;
  states: Record<string, number>;
}

export function Groups({ by, filter, choose }: { by: Label[0]; filter: string; choose: (label: Label) => void }): JSX.Element {
  const { value, problem } = useAsked<{ groups: Group[] }>(`/v1/jobs/groups?by=${by}${filter}`, LOOK_S);
  const keyName = useKeyNames();
  if (!value) return problem ? <Said problem={problem} /> : <Empty>Loading…</Empty>;
  if (!value.groups.length) return <Empty>No job matches the filters; remove one of them above.</Empty>;
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
    ["Jobs", (one) => one.jobs],
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
