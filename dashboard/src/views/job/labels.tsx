// What people call a job or a sweep and note about it; whoever may change jobs changes it here.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useDoing, useMay } from "../../hooks.ts";
import { ask } from "../../lib/api.ts";
import type { Json, Labelled } from "../../lib/types.ts";
import { Said } from "../../parts.tsx";

interface LabelsProps {
  of: Labelled;
  /** Path of the API. */
  at: string;
  again: () => void;
}

export function Labels({ of: one, at, again }: LabelsProps): JSX.Element | null {
  const may = useMay("jobs:write");
  const [isOpen, setOpen] = useState(false);
  if (isOpen) return <Change of={one} at={at} again={again} close={() => setOpen(false)} />;
  if (!may && !one.project && !one.tags.length && !one.notes) return null;
  return (
    <div class="labels">
      <p>
        {one.project && <span class="dim">{one.project}</span>}{" "}
        {one.tags.map((tag) => (
          <span key={tag} class="chip tag">
            {tag}
          </span>
        ))}{" "}
        {may && (
          <button class="plain" onClick={() => setOpen(true)}>
            Edit name, project, tags, notes
          </button>
        )}
      </p>
      {one.notes && <p class="prose">{one.notes}</p>}
    </div>
  );
}

function Change({ of: one, at, again, close }: LabelsProps & { close: () => void }): JSX.Element {
  const { doing, problem, act } = useDoing();
  const [first] = useState(one);
  const [name, setName] = useState(one.name);
  const [project, setProject] = useState(one.project);
  const [tags, setTags] = useState(one.tags.join(", "));
  const [notes, setNotes] = useState(one.notes);
  /** Without what is as it was, which somebody else may have changed meanwhile. */
  const changed = (): Json => ({
    ...(name !== first.name && { name }),
    ...(project !== first.project && { project }),
    ...(tags !== first.tags.join(", ") && { tags: tags.split(",").map((tag) => tag.trim()).filter(Boolean) }),
    ...(notes !== first.notes && { notes }),
  });
  const save = (event: Event): void => {
    event.preventDefault();
    act(async () => {
      await ask(at, { method: "PATCH", body: changed() });
      again();
      close();
    });
  };
  return (
    <form class="fields" aria-label="Name, project, tags and notes" onSubmit={save}>
      <label>
        Name
        <input required maxLength={200} value={name} onInput={(event) => setName(event.currentTarget.value)} />
      </label>
      <label>
        Project
        <input maxLength={100} value={project} onInput={(event) => setProject(event.currentTarget.value)} />
      </label>
      <label>
        Tags, separated by commas
        <input maxLength={1100} value={tags} onInput={(event) => setTags(event.currentTarget.value)} />
      </label>
      <label>
        Notes
        <textarea rows={4} maxLength={10_000} value={notes} onInput={(event) => setNotes(event.currentTarget.value)} />
      </label>
      <span class="actions">
        <button class="main" disabled={doing}>
          Save
        </button>
        <button type="button" onClick={close}>
          Discard
        </button>
      </span>
      <Said problem={problem} />
    </form>
  );
}
