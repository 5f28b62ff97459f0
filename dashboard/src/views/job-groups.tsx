// Jobs counted by a property: how many, and in which states. A click shows those of a group.

import type { JSX } from "preact";
import { useAsked, useKeyNames } from "../hooks.ts";
import { counted } from "../lib/words.ts";
import { Empty, Head, Said } from "../parts.tsx";
import type { Label } from "./job-row.tsx";

const LOOK_S = 5;

interface Group {
  name: string;
  jobs: number;
  states: Record<string, number>;
}

export function Groups({ by, filter, choose }: { by: Label[0]; filter: string; choose: (label: Label) => void }): JSX.Element {
  const { value, problem } = useAsked<{ groups: Group[] }>(`/v1/jobs/groups?by=${by}${filter}`, LOOK_S);
  const keyName = useKeyNames();
  if (!value) return problem ? <Said problem={problem} /> : <Empty>…</Empty>;
  if (!value.groups.length) return <Empty>No job matches.</Empty>;
  return (
    <>
      <Said problem={problem} />
      <table class="card groups">
        <Head of={[by, "Jobs", "States"]} />
        <tbody>
          {value.groups.map((one) => (
            <tr key={one.name}>
              <td data-label={by}>
                {one.name ? (
                  <button class="chip" onClick={() => choose([by, one.name])}>
                    {by === "owner" ? keyName(one.name) : one.name}
                  </button>
                ) : (
                  <span class="dim">none</span>
                )}
              </td>
              <td data-label="Jobs">{one.jobs}</td>
              <td data-label="States">
                {Object.entries(one.states).map(([state, count]) => `${count} ${state}`).join(", ")}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="dim count">{counted(value.groups.length, "group")}</p>
    </>
  );
}
