// The checkpoints of all jobs: lineage, names and evaluations; some of them compared by metric.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { queryNow, useAsked, useDoing, useMay, useNow, useQuery } from "../hooks.ts";
import { ask } from "../lib/api.ts";
import { metricOrders } from "../lib/checkpoints/orders.ts";
import { lineageLinks, metricRows, settingsOf, type MetricRow } from "../lib/checkpoints/registry.ts";
import type { RegisteredCheckpoint } from "../lib/types.ts";
import { ago, bytes, counted, moment, short } from "../lib/words.ts";
import { Bounded, Empty, Said, Search, Select, Table, type Column } from "../parts.tsx";
import { Evaluated } from "./job/checkpoints.tsx";

const LOOK_S = 5;
const TYPING_MS = 200;
const PAGE = 100;
/** As many as are listed at all. */
const MOST = 1000;
const SORTS: [string, string][] = [
  ["created", "newest first"],
  ["bytes", "largest first"],
];
const WEIGHTS: [string, string][] = [
  ["any", "any weights"],
  ["whole", "whole models"],
  ["lora", "adapters"],
];
const PUBLISHED: [string, string][] = [
  ["any", "with or without a name"],
  ["yes", "published"],
  ["no", "not published"],
];
/** What the address may have. */
const NAMES = ["search", "weights", "published", "sort", "setting"] as const;
type Filter = Partial<Record<(typeof NAMES)[number], string>>;

interface Answer {
  checkpoints: RegisteredCheckpoint[];
  more: boolean;
  metrics: string[];
  settings: string[];
  complete: boolean;
}

function filterOf(query: string): Filter {
  const given = new URLSearchParams(query);
  return Object.fromEntries(NAMES.flatMap((name) => (given.get(name) ? [[name, given.get(name)!]] : [])));
}

/** A text, once it has been the same for a while. */
function useTyped(text: string): string {
  const [typed, set] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => set(text), TYPING_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return typed;
}

export function Models(): JSX.Element {
  const [address, setAddress] = useQuery();
  const filter = filterOf(address);
  const [limit, setLimit] = useState(PAGE);
  const [picked, setPicked] = useState<RegisteredCheckpoint[]>([]);
  const query = useTyped(`${new URLSearchParams(filter)}`);
  const { value, problem, again } = useAsked<Answer>(`/v1/checkpoints?limit=${limit}&${query}`, LOOK_S);
  const last = useRef<Pick<Answer, "metrics" | "settings">>({ metrics: [], settings: [] }); // what can be chosen, also until the server has answered
  if (value) last.current = value;
  const change = (name: keyof Filter, text: string): void => {
    const { [name]: _, ...others } = filterOf(queryNow());
    setLimit(PAGE);
    setAddress(`${new URLSearchParams(text && text !== "any" ? { ...others, [name]: text } : others)}`);
  };
  const pick = (one: RegisteredCheckpoint): void => {
    const others = picked.filter((other) => other.checkpoint !== one.checkpoint);
    setPicked(others.length < picked.length ? others : [...picked, one]);
  };
  const sort = filter.sort ?? "created";
  const metrics = metricOrders(last.current.metrics, sort);
  const setting = filter.setting ?? "any";
  const settings = [...new Set([...(setting === "any" ? [] : [setting]), ...last.current.settings])];
  const listed = new Map(value?.checkpoints.map((one) => [one.checkpoint, one]));
  return (
    <>
      <h1>Models</h1>
      <div class="bar">
        <Search label="Search models" placeholder="Job, model, project, tag, name…" value={filter.search ?? ""} set={(text) => change("search", text)} />
        <Select label="Weights" value={filter.weights ?? "any"} of={WEIGHTS} choose={(one) => change("weights", one)} />
        <Select label="Published" value={filter.published ?? "any"} of={PUBLISHED} choose={(one) => change("published", one)} />
        <Select label="Order" value={sort} of={[...SORTS, ...metrics]} choose={(one) => change("sort", one)} />
        {settings.length > 0 && (
          <Select label="Evaluated on" value={setting} of={[["any", "evaluated on anything"], ...settings.map((one): [string, string] => [one, one])]} choose={(one) => change("setting", one)} />
        )}
      </div>
      <Said problem={problem} />
      {picked.length > 0 && (
        <Comparison of={picked.map((one) => listed.get(one.checkpoint) ?? one)} clear={() => setPicked([])} />
      )}
      {!value && !problem && <Empty>Loading…</Empty>}
      {value && !value.checkpoints.length && (
        <Empty>
          {Object.keys(filter).length ? "No checkpoint matches: clear the search or a filter above." : "No checkpoints yet: jobs save one after every train.checkpoint_every steps."}
        </Empty>
      )}
      {value && value.checkpoints.length > 0 && (
        <Listed of={value.checkpoints} isPicked={(one) => picked.some((other) => other.checkpoint === one.checkpoint)} pick={pick} again={again} />
      )}
      {value?.more && limit < MOST && <button onClick={() => setLimit(Math.min(MOST, limit + PAGE))}>More</button>}
      {value && !value.complete && (
        <p class="dim">There are {MOST.toLocaleString("en")} checkpoints or more: these are among the newest {MOST.toLocaleString("en")} and those with names. The page of a job has all of its own.</p>
      )}
    </>
  );
}

interface ListProps {
  of: RegisteredCheckpoint[];
  isPicked: (one: RegisteredCheckpoint) => boolean;
  pick: (one: RegisteredCheckpoint) => void;
  again: () => void;
}

function Listed({ of, isPicked, pick, again }: ListProps): JSX.Element {
  const now = useNow(5);
  const publishes = useMay("checkpoints:write");
  const ranked = of.find((one) => one.ranked)?.ranked;
  const columns: Column<RegisteredCheckpoint>[] = [
    ["Select", (one) => <input type="checkbox" aria-label={`Select ${one.checkpoint}`} checked={isPicked(one)} onClick={() => pick(one)} />],
    [
      "Checkpoint",
      (one) => (
        <>
          <a href={`#/jobs/${one.job}/checkpoints`}>{one.job_name}</a>{" "}
          <small class="dim">
            {one.checkpoint} · {one.kind}
            {one.project && ` · ${one.project}`}
          </small>
        </>
      ),
    ],
    ...(ranked
      ? [[ranked.metric.replace(/^val\//, ""), (one) => one.ranked && <span title={one.ranked.setting}>{short(one.ranked.value)}</span>] as Column<RegisteredCheckpoint>]
      : []),
    ["Lineage", (one) => <Lineage of={one.lineage} />],
    ["Weights", (one) => (one.lora_rank === null ? one.weights : `lora, rank ${one.lora_rank}`)],
    ["Size", (one) => <span title={`${bytes(one.bytes)} with the trainer's state`}>{bytes(one.model_bytes)}</span>],
    ["Created", (one) => <span title={moment(one.created)}>{ago(one.created, now)}</span>, "dim"],
    ["Evaluations", (one) => <Evaluated of={one.evaluations} />],
    [
      "Published as",
      (one) => (
        <>
          {one.published.join(", ")} {publishes && <Publish checkpoint={one.checkpoint} again={again} />}
        </>
      ),
    ],
  ];
  return (
    <>
      {ranked && (
        <p class="dim">
          By {ranked.metric.replace(/^val\//, "")} on {ranked.setting}.
        </p>
      )}
      <Table of={columns} rows={of} by={(one) => one.checkpoint} look="card models" row={(one) => ({ "aria-selected": isPicked(one) })} />
    </>
  );
}

function Lineage({ of }: { of: string[] }): JSX.Element {
  return (
    <span class="lineage">
      {lineageLinks(of).map(({ text, to }, place) => (
        <span key={text}>
          {place > 0 && " → "}
          {to === null ? text : <a href={`#${to}`}>{text}</a>}
        </span>
      ))}
    </span>
  );
}

function Publish({ checkpoint, again }: { checkpoint: string; again: () => void }): JSX.Element {
  const [isOpen, setOpen] = useState(false);
  const { doing, problem, act } = useDoing();
  const [name, setName] = useState("");
  const submit = (event: Event): void => {
    event.preventDefault();
    act(async () => {
      await ask("/v1/published", { method: "POST", body: { name: name.trim(), checkpoint } });
      setOpen(false);
      setName("");
      again();
    });
  };
  if (!isOpen) {
    return (
      <button aria-label={`Publish ${checkpoint}`} onClick={() => setOpen(true)}>
        Publish
      </button>
    );
  }
  return (
    <form onSubmit={submit}>
      <input aria-label="Name" placeholder="name.v1" maxLength={63} autofocus value={name} onInput={(event) => setName(event.currentTarget.value)} />{" "}
      <button type="submit" disabled={doing || !name.trim()}>
        Publish
      </button>{" "}
      <button type="button" onClick={() => setOpen(false)}>
        Cancel
      </button>
      <Said problem={problem} />
    </form>
  );
}

function Comparison({ of, clear }: { of: RegisteredCheckpoint[]; clear: () => void }): JSX.Element {
  const settings = settingsOf(of);
  const [chosen, setChosen] = useState("");
  const setting = settings.includes(chosen) ? chosen : (settings[0] ?? "");
  const rows = metricRows(of, setting);
  const columns: Column<MetricRow>[] = [
    ["Metric", (row) => row.name],
    ...of.map((one, place): Column<MetricRow> => [
      one.published[0] ?? one.checkpoint,
      ({ cells, best }) => <Bounded of={cells[place]} isBest={best.includes(place)} />,
    ]),
  ];
  return (
    <section class="card compared">
      <h2>{counted(of.length, "checkpoint")} compared by evaluation</h2>
      <p>
        {settings.length > 1 ? <Select label="Setting" value={setting} of={settings.map((one) => [one, one])} choose={setChosen} /> : setting}{" "}
        <button onClick={clear}>Clear the selection</button>
      </p>
      {rows.length === 0 ? (
        <Empty>
          None of them has been evaluated. <code>opentinker eval JOB --at STEP</code> does that.
        </Empty>
      ) : (
        <Table of={columns} rows={rows} by={(row) => row.name} />
      )}
    </section>
  );
}
