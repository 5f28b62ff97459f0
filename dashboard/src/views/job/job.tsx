// One job: what it does now, and the tabs below.

import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { go, isKey, useAsked, useDoing, useFollow, useHeard, useKeyNames, useMay, useNow } from "../../hooks.ts";
import { ask, job as path } from "../../lib/api.ts";
import type { Beside, Follow } from "../../lib/live/follow.ts";
import { sizeOf } from "../../lib/live/join.ts";
import { secondsLeft } from "../../lib/jobs/pace.ts";
import { advances, partsOf } from "../../lib/curves/policies.ts";
import type { Metrics } from "../../lib/curves/series.ts";
import { ENDLESS, FINAL, type JobDetail } from "../../lib/types.ts";
import { ago, counted, duration, moment } from "../../lib/words.ts";
import { Empty, Facts, Progress, Said, State } from "../../parts.tsx";
import { Chat } from "./chat.tsx";
import { Checkpoints } from "./checkpoints.tsx";
import { ClientModels } from "./client-models.tsx";
import { Config } from "./config.tsx";
import { Curves } from "./curves.tsx";
import { Data } from "./data.tsx";
import { Episodes } from "./episodes.tsx";
import { Labels } from "./labels.tsx";
import { Log } from "./log.tsx";
import { Results } from "./results.tsx";
import { Timeline } from "./timeline.tsx";
import { Why } from "./why.tsx";
import { Share } from "../share.tsx";

const PACE = 20;
const HEAD_S = 5;
const TELLS: Beside[] = ["events"];

/** `part` empty: the first one. `at`: the step that a part begins with, if it has steps. */
export function JobView({ id, part, at }: { id: string; part: string; at: string }): JSX.Element {
  const { value: job, problem, again } = useAsked<JobDetail>(path(id), HEAD_S);
  const follow = useFollow(job ? id : null);
  useHeard(follow, TELLS, again);
  const over = job ? FINAL.includes(job.state) : false;
  useEffect(() => {
    if (over) follow?.end();
  }, [over, follow]);
  useEffect(() => {
    document.title = job ? `${job.name} · OpenTinker` : "OpenTinker";
    return () => void (document.title = "OpenTinker");
  }, [job?.name]);
  if (!job) return problem ? <Said problem={problem} /> : <Empty>Loading…</Empty>;
  const shown = part || (job.kind === "tinker" ? "models" : "curves");
  const tabs: [string, string][] = [
    ...(job.kind === "tinker" ? ([["models", "Models"]] as [string, string][]) : []),
    ["curves", "Curves"],
    ["timeline", "Timeline"],
    ...(["rl", "eval"].includes(job.kind) ? ([["episodes", "Episodes"]] as [string, string][]) : []),
    ...(ENDLESS.includes(job.kind) ? [] : ([["data", "Data"]] as [string, string][])),
    ["log", "Log"],
    ["config", "Config"],
    ...(job.kind === "inference" ? ([["chat", "Chat"]] as [string, string][]) : []),
    ...(["rl", "sft", "dpo"].includes(job.kind) ? ([["checkpoints", "Checkpoints"]] as [string, string][]) : []),
  ];
  return (
    <>
      <Said problem={problem} />
      <Top job={job} follow={follow} again={again} />
      {job.result && <Results result={job.result} />}
      <nav class="tabs" aria-label="Parts of the job">
        {tabs.map(([name, text]) => (
          <a key={name} href={`#/jobs/${id}/${name}`} aria-current={shown === name ? "page" : undefined}>
            {text}
          </a>
        ))}
      </nav>
      {shown === "models" && job.kind === "tinker" && <ClientModels job={job} />}
      {shown === "curves" && follow && <Curves job={job} follow={follow} />}
      {shown === "timeline" && <Why job={job} />}
      {shown === "timeline" && follow && <Timeline job={job} follow={follow} />}
      {shown === "episodes" && <Episodes key={at} job={job} follow={follow} at={at} />}
      {shown === "data" && <Data job={job} />}
      {shown === "log" && <Log job={job} follow={follow} />}
      {shown === "config" && <Config job={job} />}
      {shown === "checkpoints" && <Checkpoints job={job} />}
      {shown === "chat" && <Chat job={job} />}
    </>
  );
}

function Top({ job, follow, again }: { job: JobDetail; follow: Follow | null; again: () => void }): JSX.Element {
  const now = useNow(1);
  const over = FINAL.includes(job.state);
  const pace = follow ? paceOf(job, follow) : null;
  const left = pace && job.state === "running" && job.steps ? pace * (job.steps - job.step) : secondsLeft(job, now);
  const keyName = useKeyNames();
  return (
    <section class="card top">
      <div class="title">
        <h1>{job.name}</h1>
        <State state={job.state} />
        <Signal follow={follow} />
        <span class="spring" />
        <Actions job={job} again={again} />
      </div>
      <Labels of={job} at={path(job.id)} again={again} />
      {!ENDLESS.includes(job.kind) && (
        <div class="line">
          <Progress {...job} />
          {follow && advances(job, follow.joined).map((one) => <Progress key={one.policy} {...one} />)}
          <small>
            {left !== null && <>{duration(left)} left · </>}
            {pace !== null && pace > 0 && !over && <>{(1 / pace).toFixed(pace < 1 ? 1 : 2)} steps/s · </>}
            {over ? "took" : "for"} {duration((job.finished ?? now) - job.created)}
          </small>
        </div>
      )}
      {job.waiting_for && <p class="waits">Waits for {job.waiting_for}</p>}
      {job.reason && <p class={job.state === "failed" ? "problem" : "dim"}>{job.reason}</p>}
      <Facts
        of={[
          ["Job", <code key="id">{job.id}</code>],
          ["Kind", job.kind],
          ["Model", <code key="model">{job.model}</code>],
          ...origin(job),
          job.environment && ["Environment", job.environment],
          ["Workers", job.workers.length ? job.workers.map((w) => `${w.id} (${w.status})`).join(", ") : "none"],
          ["Owner", `${job.tenant}${job.key ? ` · ${isKey(job.key) ? "key " : ""}${keyName(job.key)}` : ""}`],
          ["Submitted", `${moment(job.created)}${over && job.finished ? ` · ended ${ago(job.finished, now)}` : ""}`],
          job.restarts && ["Restarts", job.restarts],
        ]}
      />
    </section>
  );
}

/** From which checkpoint it started, and whether it trains an adapter. */
function origin(job: JobDetail): [string, JSX.Element | string][] {
  const { model, start } = job.spec as { model?: { lora?: { rank: number } | null }; start?: { from?: string | null } | null };
  const from = start?.from;
  return [
    ...(from ? ([["Started from", <a key="from" href={`#/jobs/${from.split(/[~@]/)[0]}/checkpoints`}>{from}</a>]] as [string, JSX.Element][]) : []),
    ...(model?.lora ? ([["LoRA", `rank ${model.lora.rank}`]] as [string, string][]) : []),
  ];
}

/** Seconds per step of the job, over the last steps: of several policies, those of the slowest. */
function paceOf(job: JobDetail, follow: Follow): number | null {
  const { own } = partsOf(follow.joined);
  if (!own.size) return meanStep(follow.joined);
  const paces = advances(job, follow.joined).flatMap(({ policy, steps }) => {
    const part = own.get(policy);
    const seconds = part && meanStep(part);
    return seconds && job.steps ? [(seconds * steps) / job.steps] : [];
  });
  return paces.length ? Math.max(...paces) : null;
}

function meanStep(of: Metrics): number | null {
  for (const points of of.sources.values()) {
    const last = points.filter((p) => "step_seconds" in p.values).slice(-PACE);
    if (last.length) return last.reduce((sum, p) => sum + p.values["step_seconds"]!, 0) / last.length;
  }
  return null;
}

const WAYS: Record<string, string> = {
  loading: "reading history",
  live: "live",
  joining: "reconnecting",
  polling: "not live, polling every 2 s",
  ended: "complete",
};

/** Whether what is seen is what there is. */
function Signal({ follow }: { follow: Follow | null }): JSX.Element | null {
  if (!follow) return null;
  const gaps = sizeOf(follow.joined.gaps());
  const lost = follow.joined.missing;
  return (
    <small class={`signal ${follow.way}`} data-way={follow.way} title={follow.said} role="status">
      <i /> {WAYS[follow.way]}
      {follow.said && follow.way !== "live" ? `: ${follow.said}` : ""}
      {gaps > 0 && <b> · {counted(gaps, "point")} missing, fetching</b>}
      {lost > 0 && <b> · {counted(lost, "point")} lost</b>}
      {follow.joined.forgotten > 0 && <b> · the oldest {follow.joined.forgotten} points are not shown</b>}
    </small>
  );
}

function Actions({ job, again }: { job: JobDetail; again: () => void }): JSX.Element | null {
  const may = useMay("jobs:write");
  const { doing, problem, act } = useDoing();
  if (!may) return null;
  const over = FINAL.includes(job.state);
  const call = (verb: string, question = ""): void => {
    if (question && !window.confirm(question)) return;
    act(async () => {
      await ask(path(job.id, `/${verb}`), { method: "POST" });
      again();
    });
  };
  const verbs = [
    ...(["queued", "starting", "running"].includes(job.state) ? ["Pause"] : job.state === "paused" ? ["Resume"] : []),
    ...(ENDLESS.includes(job.kind) && !over ? ["Complete"] : []),
  ];
  return (
    <span class="actions">
      {verbs.map((verb) => (
        <button key={verb} disabled={doing} onClick={() => call(verb.toLowerCase())}>
          {verb}
        </button>
      ))}
      {!over && (
        <button class="danger" disabled={doing} onClick={() => call("cancel", `Cancel ${job.name}? Its checkpoints stay.`)}>
          Cancel
        </button>
      )}
      <button onClick={() => go("submit", job.id)}>Clone</button>
      <Share jobs={[job.id]} />
      <Said problem={problem} />
    </span>
  );
}
