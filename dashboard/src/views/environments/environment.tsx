// One environment: what its author says, its settings, an example episode, and an episode that the reader plays.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked, useMay } from "../../hooks.ts";
import { configOf, settingsOf, type Setting } from "../../lib/settings.ts";
import { job as path } from "../../lib/api.ts";
import { botsOfJob } from "../../lib/seats.ts";
import type { About, JobDetail, Json } from "../../lib/types.ts";
import { bytes, counted, moment } from "../../lib/words.ts";
import { Empty, Facts, Said, Table, type Column } from "../../parts.tsx";
import { Play, type Start } from "./play.tsx";
import { Seats, useSeats } from "./seats.tsx";

const NO_BOTS: Record<string, string> = {};

export function EnvironmentView({ name }: { name: string }): JSX.Element {
  const { value: about, problem } = useAsked<About>(`/v1/environment?name=${encodeURIComponent(name)}`);
  const versions = useAsked<{ versions: Version[] }>(uploadOf(name) && `/v1/environments/${encodeURIComponent(uploadOf(name)!)}`);
  return (
    <>
      <p>
        <a href="#/environments">Environments</a>
      </p>
      <section class="card">
        <h1>{name}</h1>
        <Said problem={problem ?? versions.problem} />
        {!about && !problem && <Empty>An env worker is reading it…</Empty>}
        {about && (
          <>
            <p class="prose">{about.doc || "Its author has not described it: the docstring of its class appears here."}</p>
            <Facts
              of={[
                ["seats", about.seats.filter(Boolean).join(", ") || "one"],
                ["scripted players", about.bots.join(", ") || "none"],
                ["forks", about.can_fork ? "yes: trees of turns can be sampled" : "no"],
              ]}
            />
          </>
        )}
      </section>
      {about && <Settings about={about} />}
      {versions.value && <Versions of={versions.value.versions} />}
      {about && <Example name={name} text={about.example} />}
      {about && <OwnEpisode name={name} />}
    </>
  );
}

interface Version {
  version: number;
  class: string;
  files: number;
  bytes: number;
  pushed: number;
}

const VERSIONS: Column<Version>[] = [
  ["Version", (one) => one.version],
  ["Class", (one) => <code>{one.class}</code>],
  ["Size", (one) => `${bytes(one.bytes)} in ${counted(one.files, "file")}`],
  ["Pushed", (one) => moment(one.pushed), "dim"],
];

function Versions({ of }: { of: Version[] }): JSX.Element {
  return (
    <section class="card">
      <h2>Versions</h2>
      <Table of={VERSIONS} rows={[...of].reverse()} by={(one) => one.version} />
    </section>
  );
}

/** The name of a pushed package in `upload:NAME@VERSION`. */
function uploadOf(name: string): string | null {
  return /^upload:([^@]+)/.exec(name)?.[1] ?? null;
}

const COLUMNS: Column<Setting>[] = [
  ["environment.config", (one) => <code>{one.name}</code>],
  ["Type", (one) => one.kind],
  ["Default", (one) => (one.standard ? <code>{one.standard}</code> : "required")],
  ["Meaning", (one) => one.meaning, "prose"],
];

function Settings({ about }: { about: About }): JSX.Element {
  const settings = settingsOf(about);
  return (
    <section class="card">
      <h2>Settings</h2>
      {!settings.length && <Empty>It has no settings.</Empty>}
      {settings.length > 0 && <Table of={COLUMNS} rows={settings} by={(one) => one.name} />}
    </section>
  );
}

function Example({ name, text }: { name: string; text: string }): JSX.Element {
  return (
    <section class="card">
      <h2>An episode</h2>
      {text ? (
        <pre>{text}</pre>
      ) : (
        <Empty>
          <code>opentinker env check {name} --save</code> plays one, checks it, and shows it here.
        </Empty>
      )}
    </section>
  );
}

function OwnEpisode({ name }: { name: string }): JSX.Element | null {
  const [config, setConfig] = useState("");
  const [row, setRow] = useState(0);
  const [seed, setSeed] = useState(0);
  const [wrong, setWrong] = useState("");
  const [start, setStart] = useState<Start | null>(null);
  const [environment, setEnvironment] = useState<Record<string, Json>>({ name, config: {} }); // of the last readable config
  const may = useMay("jobs:write");
  const seats = useSeats(may ? environment : null, NO_BOTS);
  if (!may) return null;
  const read = (): void => {
    try {
      setEnvironment({ name, config: configOf(config) });
    } catch {
      return; // Begin says so
    }
  };
  const begin = (event: Event): void => {
    event.preventDefault();
    try {
      const now = { name, config: configOf(config) };
      if (seats.wrong) return setWrong(seats.wrong);
      setStart({ environment: now, row, seed, bots: seats.taken });
      setWrong("");
    } catch (error) {
      setWrong(`The config is ${error instanceof Error ? error.message : String(error)}.`);
    }
  };
  return (
    <section class="card">
      <h2>Play it yourself</h2>
      {start ? (
        <Play start={start} leave={() => setStart(null)} />
      ) : (
        <form class="fields" onSubmit={begin}>
          <label>
            Config, as JSON
            <input value={config} maxLength={20_000} placeholder="{}" spellcheck={false} onInput={(event) => setConfig(event.currentTarget.value)} onChange={read} />
          </label>
          <Whole label="Row" value={row} set={setRow} />
          <Whole label="Seed" value={seed} set={setSeed} />
          <Seats of={seats} />
          <button>Begin</button>
          {wrong && <p class="problem">{wrong}</p>}
        </form>
      )}
    </section>
  );
}

function Whole({ label, value, set }: { label: string; value: number; set: (value: number) => void }): JSX.Element {
  return (
    <label>
      {label}
      <input type="number" min={0} max={2 ** 32 - 1} step={1} required value={value} onInput={(event) => set(event.currentTarget.valueAsNumber)} />
    </label>
  );
}

/** A task of a job, played with the job's own environment. */
export function JobPlay({ id, row }: { id: string; row: string }): JSX.Element {
  const { value: job, problem } = useAsked<JobDetail>(path(id));
  if (!job) return problem ? <Said problem={problem} /> : <Empty>Loading…</Empty>;
  const spec = job.spec as Record<string, Json>;
  const environment = spec["environment"] as Record<string, Json>;
  return (
    <section class="card">
      <p>
        <a href={`#/jobs/${id}`}>{job.name}</a>
      </p>
      <h1>
        {String(environment["name"])}, row {row}
      </h1>
      <JobEpisode environment={environment} entries={botsOfJob(spec["seats"])} row={Number.parseInt(row, 10) || 0} />
    </section>
  );
}

interface JobEpisodeProps {
  environment: Record<string, Json>;
  entries: Record<string, string>;
  row: number;
}

/** It begins at once where there is no choice of players. */
function JobEpisode({ environment, entries, row }: JobEpisodeProps): JSX.Element {
  const seats = useSeats(environment, entries);
  const [bots, setBots] = useState<Record<string, string> | null>(null);
  const [wrong, setWrong] = useState("");
  const isChosen = seats.known && !Object.keys(seats.choices).length;
  const begin = (event: Event): void => {
    event.preventDefault();
    setWrong(seats.wrong);
    if (!seats.wrong) setBots(seats.taken);
  };
  if (bots || isChosen) return <Play start={{ environment, row, seed: 0, bots: bots ?? {} }} leave={() => history.back()} />;
  if (!seats.known) return seats.problem ? <Said problem={seats.problem} /> : <Empty>An env worker is reading it…</Empty>;
  return (
    <form class="fields" onSubmit={begin}>
      <Seats of={seats} />
      <button>Begin</button>
      {wrong && <p class="problem">{wrong}</p>}
    </form>
  );
}
