// Filters of the lists of jobs and of sweeps by what they are: one control for each property, with the values that there are.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked, useKeyNames } from "../../hooks.ts";
import { valueOf, type Label, type Property } from "../../lib/jobs/view.ts";
import { Select } from "../../parts.tsx";
import { countIn, type Group, type Many } from "./groups.tsx";

const SHOWN: Property[] = ["kind", "environment", "model", "owner", "project", "tag"];

interface Props {
  of: Many;
  labels: Label[];
  choose: (label: Label) => void;
}

export function Filters({ of, labels, choose }: Props): JSX.Element {
  const [open, setOpen] = useState(false);
  return (
    <details class="columns" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Filters</summary>
      {open && (
        <div class="card">
          {SHOWN.map((name) => (
            <Values key={name} of={of} name={name} value={valueOf(labels, name)} choose={choose} />
          ))}
        </div>
      )}
    </details>
  );
}

function Values({ of, name, value, choose }: { of: Many; name: Property; value: string; choose: (label: Label) => void }): JSX.Element {
  const asked = useAsked<{ groups: Group[] }>(`/v1/${of}/groups?by=${name}`);
  const keyName = useKeyNames();
  const said = (one: string): string => (name === "owner" ? keyName(one) : one);
  const found = (asked.value?.groups ?? []).filter((one) => one.name);
  const options = found.map((one): [string, string] => [one.name, `${said(one.name)} (${countIn(one)})`]);
  const known = !value || found.some((one) => one.name === value);
  return (
    <label class="filter">
      <small class="dim">{name}</small>
      <Select label={`Filter by ${name}`} value={value} of={[["", "any"], ...(known ? [] : [[value, said(value)] as const]), ...options]} choose={(one) => choose([name, one])} />
    </label>
  );
}

/** A filter that can be removed. */
export function Chip({ label: [name, value], remove }: { label: Label; remove: () => void }): JSX.Element {
  return (
    <button class="chip" title="Remove from the filter" onClick={remove}>
      {name}: {name === "owner" ? <Owner id={value} /> : value} ×
    </button>
  );
}

function Owner({ id }: { id: string }): JSX.Element {
  return <>{useKeyNames()(id)}</>;
}
