// Specs that are made from those of jobs: to serve a checkpoint, to run again, to go on from a checkpoint.

import { Problem } from "./api.ts";
import { partOf } from "./curves/policies.ts";
import type { Json, JobDetail, Sweep } from "./types.ts";

type Table = { [name: string]: Json };

function table(value: Json | undefined): Table {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? value : {};
}

function picked(from: Table, ...names: string[]): Table {
  return Object.fromEntries(names.flatMap((name) => (from[name] === undefined || from[name] === null ? [] : [[name, from[name]]])));
}

/** The settings of a job, or of one of its policies: the job's, but for its own. */
function settingsOf(job: JobDetail, policy: string): Table {
  const spec = table(job.spec);
  return { ...spec, ...table(table(spec["policies"])[policy]) };
}

/** An inference job of one checkpoint, as `examples/inference.toml` has it. */
export function inferenceSpec(job: JobDetail, step: number, policy = ""): Json {
  const spec = settingsOf(job, policy);
  const rollout = picked(table(spec["rollout"]), "engine", "toy", "context_length");
  const gpus = Number(table(table(job.spec)["resources"])["rollout_gpus"] ?? 0);
  return {
    name: named(policy ? `${job.name}-${policy}` : job.name, "chat"),
    kind: "inference",
    model: picked(table(spec["model"]), "base", "chat_template"),
    ...(Object.keys(rollout).length ? { rollout } : {}),
    start: { from: `${partOf(job.id, policy)}@${step}` },
    serving: { idle_s: 900 },
    ...(gpus > 1 ? { resources: { rollout_gpus: gpus } } : {}),
  };
}

/** Whether its checkpoints are adapters, which need their base model beside them. */
export function savesAdapters(job: JobDetail, policy = ""): boolean {
  return Boolean(table(settingsOf(job, policy)["model"])["lora"]);
}

/** What may be asked of an inference job beside its own model. */
export function adaptersOf(job: JobDetail): string[] {
  const listed = table(table(job.spec)["serving"])["adapters"];
  return Array.isArray(listed) ? listed.map((one) => String(table(one)["name"])) : [];
}

/** A sweep's id, which its jobs have among their tags; people's tags may look like one. */
const SWEEP_ID = /^s-[a-z0-9]{10}$/;

function tagsOf(job: JobDetail): Json[] {
  const tags = table(job.spec)["tags"];
  return Array.isArray(tags) ? tags : [];
}

/** The sweep that a job belongs to, empty if there is none. `read` throws a Problem of status 404 where a tag is no sweep's. */
export async function sweepOf(job: JobDetail, read: (sweep: string) => Promise<Pick<Sweep, "all_trials">>): Promise<string> {
  for (const tag of tagsOf(job).map(String).filter((one) => SWEEP_ID.test(one))) {
    try {
      if ((await read(tag)).all_trials.some((trial) => trial.jobs.some((one) => one.id === job.id))) return tag;
    } catch (problem) {
      if (!(problem instanceof Problem && problem.status === 404)) throw problem;
    }
  }
  return "";
}

/** The same again under a name of its own, and not in the sweep of the job; with a step, from that checkpoint. */
export function cloneSpec(job: JobDetail, step: string, sweep = ""): Json {
  const { tags: _, ...settings } = table(job.spec);
  const own = tagsOf(job).filter((tag) => tag !== sweep);
  const spec = { ...settings, name: named(job.name, "again"), ...(own.length ? { tags: own } : {}) };
  return step ? { ...spec, start: { from: `${job.id}@${step}` } } : spec;
}

function named(name: string, what: string): string {
  return name.endsWith(`-${what}`) ? name : `${[...name].slice(0, 190).join("")}-${what}`; // whole characters
}
