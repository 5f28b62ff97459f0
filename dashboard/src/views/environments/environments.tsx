// Environments of the tenant: what was pushed, and what `opentinker env check --save` has found, one report each.

import type { JSX } from "preact";
import { go, useAsked, useNow } from "../../hooks.ts";
import type { Check, CheckSummary, Pushed } from "../../lib/types.ts";
import { ago, bytes, counted } from "../../lib/words.ts";
import { Empty, Facts, Said, Table, type Column } from "../../parts.tsx";

const LOOK_S = 10;

export function Environments(): JSX.Element {
  const pushed = useAsked<Offered>("/v1/environments", LOOK_S);
  const checks = useAsked<{ checks: CheckSummary[] }>("/v1/checks", LOOK_S);
  return (
    <>
      <h1 class="unseen">Environments</h1>
      <Said problem={pushed.problem ?? checks.problem} />
      <section class="card">
        <h2>Built in</h2>
        {pushed.value && <BuiltIn names={pushed.value.built_in} summaries={pushed.value.summaries} />}
      </section>
      <section class="card">
        <h2>Checks</h2>
        {checks.value && <Checks checks={checks.value.checks} />}
      </section>
      <section class="card">
        <h2>Pushed</h2>
        {pushed.value && <PushedTable pushed={pushed.value.environments} />}
      </section>
    </>
  );
}

interface Offered {
  environments: Pushed[];
  built_in: string[];
  summaries: Record<string, string>;
}

function BuiltIn({ names, summaries }: { names: string[]; summaries: Record<string, string> }): JSX.Element {
  if (!names.length) return <Empty>No env worker is running. Environments appear here once one is.</Empty>;
  const columns: Column<string>[] = [
    ["Name", (name) => <a href={`#/environment/${encodeURIComponent(name)}`}>{name}</a>],
    ["What it is", (name) => summaries[name], "prose"],
  ];
  return <Table of={columns} rows={names} by={(name) => name} />;
}

function Checks({ checks }: { checks: CheckSummary[] }): JSX.Element {
  const now = useNow(5);
  if (!checks.length) {
    return (
      <Empty>
        None yet. <code>opentinker env check NAME --save</code> plays an environment and keeps its report here.
      </Empty>
    );
  }
  const columns: Column<CheckSummary>[] = [
    ["Environment", (check) => <a href={`#/environments/${check.id}`}>{check.environment}</a>],
    ["Verdict", (check) => check.verdict],
    ["Errors", (check) => check.errors],
    ["Checked", (check) => ago(check.at, now), "dim"],
  ];
  return <Table of={columns} rows={checks} by={(check) => check.id} row={(check) => ({ onClick: () => go("environments", check.id) })} />;
}

function PushedTable({ pushed }: { pushed: Pushed[] }): JSX.Element {
  const now = useNow(5);
  if (!pushed.length) {
    return (
      <Empty>
        None yet. <code>opentinker env push DIRECTORY</code> uploads one.
      </Empty>
    );
  }
  const columns: Column<Pushed>[] = [
    ["Name", (one) => <a href={`#/environment/${encodeURIComponent(`upload:${one.name}`)}`}>{one.name}</a>],
    ["Class", (one) => <code>{one.class}</code>],
    ["Versions", (one) => one.versions],
    ["Size", (one) => `${bytes(one.bytes)} in ${counted(one.files, "file")}`],
    ["Pushed", (one) => ago(one.pushed, now), "dim"],
  ];
  return <Table of={columns} rows={pushed} by={(one) => one.name} />;
}

export function CheckView({ id }: { id: string }): JSX.Element {
  const now = useNow(5);
  const { value: check, problem } = useAsked<Check>(`/v1/checks/${encodeURIComponent(id)}`);
  if (!check) return problem ? <Said problem={problem} /> : <p class="empty">…</p>;
  const report = check.report;
  return (
    <>
      <p>
        <a href="#/environments">Environments</a>
      </p>
      <section class="card">
        <h1>{check.environment}</h1>
        <p>
          {check.verdict} <small class="dim">checked {ago(check.at, now)}</small>
        </p>
        <Facts of={Object.entries(report.facts)} />
        <Lines title="Errors" lines={report.errors} />
        <Lines title="Advice" lines={report.advice} />
      </section>
      {report.rows.length > 0 && (
        <section class="card">
          <h2>{counted(report.rows.length, "row")}</h2>
          <div class="scrolls">
            <Table of={report.columns.map((name, at): Column<string[]> => [name, (row) => row[at]])} rows={report.rows} by={(row) => row[0]!} />
          </div>
        </section>
      )}
      {report.transcript && (
        <section class="card">
          <h2>An episode</h2>
          <pre>{report.transcript}</pre>
        </section>
      )}
    </>
  );
}

function Lines({ title, lines }: { title: string; lines: string[] }): JSX.Element | null {
  if (!lines.length) return null;
  return (
    <>
      <h2>{title}</h2>
      <ul>
        {lines.map((line) => (
          <li key={line}>{line}</li>
        ))}
      </ul>
    </>
  );
}
