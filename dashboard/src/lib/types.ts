// What the HTTP API says, as far as the page reads it. The document itself is /openapi.json.

export interface Job {
  id: string;
  name: string;
  project: string;
  tags: string[];
  notes: string;
  kind: string;
  tenant: string;
  state: string;
  epoch: number;
  created: number;
  /** When it came to the queue or, once it has begun, when it started. */
  since: number;
  updated: number;
  finished: number | null;
  step: number;
  steps: number;
  reason: string;
  restarts: number;
  key: string;
  waiting_for: string;
  priority: number;
  progress: Progress;
  /** Mean reward, or loss, over the steps so far. */
  curve: number[];
  environment?: string;
  model: string;
}

/** What people call a job or a sweep, and note about it. */
export interface Labelled {
  id: string;
  name: string;
  project: string;
  tags: string[];
  notes: string;
}

export interface SweepSummary extends Labelled {
  key: string;
  kind: string;
  /** Empty where it is varied. */
  model: string;
  environment: string;
  state: string;
  reason: string;
  method: string;
  metric: string;
  goal: string;
  created: number;
  finished: number | null;
  /** Trials that there will be at most. */
  planned: number;
  /** Trials that there are, by state. */
  trials: Record<string, number>;
  jobs: number;
  best: { number: number; value: number; settings: Record<string, unknown> } | null;
}

export interface SweepTrial {
  number: number;
  settings: Record<string, unknown>;
  state: string;
  reason: string;
  value: number | null;
  created: number;
  finished: number | null;
  jobs: { id: string; seed: number | null; state: string; step: number; value: number | null }[];
}

export interface Sweep extends SweepSummary {
  spec: { sweep: { parameters: Record<string, unknown> } };
  all_trials: SweepTrial[];
  importance: Record<string, number>;
  worker_s: number;
  /** Messages of [[notify]] that were given up. */
  undelivered: { time: number; occasion: string; entry: number; error: string }[];
}

/** The trainer's last report: numbers by name or, of a job with several policies, those of each. */
export type Progress = Record<string, number> | { policies: Record<string, Record<string, number>> };

export interface JobDetail extends Job {
  notes: string;
  spec: Json;
  /** Of a job with several. */
  policies?: Record<string, unknown>;
  /** Of a job with opponent pools. */
  pools?: Record<string, OpponentPool>;
  workers: { id: string; status: string }[];
  /** Of an eval job that has succeeded. */
  result?: EvalResult;
  metrics: Record<string, { step: number; time: number; values: Record<string, number> }>;
}

export interface OpponentPool {
  /** Whose past versions its members are; empty: of the job's one policy. */
  policy: string;
  /** Oldest first. */
  members: PoolMember[];
}

/** Games of the policy against one of its past versions. */
export interface PoolMember {
  version: string;
  won: number;
  drawn: number;
  lost: number;
  /** Of the policy, in recent games; null with less than one. */
  win_rate: number | null;
  /** Elo points above the policy. */
  rating: number | null;
  rating_error: number | null;
}

export interface EvalResult {
  /** The evaluated weights, EPOCH.STEP. */
  version: string;
  step: number;
  /** val/* metrics; NAME/low and NAME/high are the interval of NAME. */
  values: Record<string, number>;
  categories: Category[];
}

/** A mean over start states with its interval. */
export interface Estimate {
  value: number;
  low: number | null;
  high: number | null;
}

/** Episodes of an evaluation with the metric task/NAME. */
export interface Category {
  name: string;
  episodes: number;
  reward: Estimate;
  /** Share of the episodes. */
  solved: Estimate;
}

/** The newest version of an environment that was pushed. */
export interface Pushed {
  name: string;
  class: string;
  versions: number;
  files: number;
  bytes: number;
  pushed: number;
}

/** An entry of a job's event log. */
export interface Event {
  id: string;
  event: string;
  time: number;
  [name: string]: Json;
}

/** What the author of an environment says about it. */
export interface About {
  name: string;
  doc: string;
  settings: { properties?: Record<string, Json>; required?: string[] };
  bots: string[];
  /** Those of its class; a config may name others. */
  seats: string[];
  can_fork: boolean;
  /** An episode as text, and who played it; empty if there is none. */
  example: string;
}

/** What one seat sees next in an episode that a person plays. */
export interface PlayedPrompt {
  seat: string;
  stream: string;
  messages: { role: string; content: string; images: string[] }[];
  tools: { name: string; description: string; parameters: Json }[];
}

export interface PlayedEpisode {
  id: string;
  environment: string;
  turn: number;
  prompts: PlayedPrompt[];
  reward: number;
  components: Record<string, number>;
  rewards: Record<string, Record<string, number>>;
  metrics: Record<string, number>;
  done: boolean;
  truncated: boolean;
  error: string;
}

/** A report of `opentinker env check --save`. */
export interface CheckSummary {
  id: string;
  environment: string;
  verdict: string;
  errors: number;
  at: number;
}

export interface Check extends CheckSummary {
  report: {
    errors: string[];
    advice: string[];
    facts: Record<string, string>;
    transcript: string;
    columns: string[];
    rows: string[][];
  };
}

/** One line of metrics. `seq` counts the points of one incarnation of a source, so that gaps show. */
export interface Point {
  source: string;
  incarnation: string;
  seq: number;
  time: number;
  step: number;
  values: Record<string, number>;
}

export interface Worker {
  id: string;
  incarnation: string;
  pool: string;
  host: string;
  pid: number;
  job: string | null;
  status: string;
  detail: Record<string, unknown>;
  gpus: { index: number; model: string; memory: number }[];
  /** CPUs of its machine; 0: it did not say. */
  cores: number;
  /** The same for all workers of one machine, in containers too; empty: it did not say. */
  machine: string;
  lease: { job: string; epoch: number; leaves_by: number } | null;
}

export interface Queue {
  stream: string;
  messages: number;
  bytes: number;
  subjects: Record<string, number>;
}

export interface Checkpoint {
  step: number;
  epoch: number;
  created: number;
  bytes: number;
  model_bytes: number;
}

/** Who the server thinks we are. */
export interface Me {
  tenant: string;
  role: string;
  /** Its id; null for users without one, and on a server that asks for none. */
  key: string | null;
  /** Name of a user who signed in without a key. */
  user: string | null;
  /** What it may. */
  scopes: string[];
  /** All that a share link shows; none of ordinary keys. */
  jobs: string[];
}

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

export const FINAL = ["succeeded", "failed", "cancelled"];
/** Kinds of jobs that serve requests until they are completed or cancelled. */
export const ENDLESS = ["inference", "tinker"];

/** An eval job that played a checkpoint, or the evaluation that its own job made while it trained. */
export interface Evaluation {
  job: string;
  name: string;
  policy: string;
  step: number;
  state: string;
  environment: string;
  /** Environment and config, players, sampling; or the rows. Evaluations may be compared where it is equal. */
  setting: string;
  values: Record<string, number>;
  categories: Category[];
  during_training: boolean;
}

/** A checkpoint in the list of all jobs'. */
export interface RegisteredCheckpoint {
  /** JOB@STEP. */
  checkpoint: string;
  job: string;
  job_name: string;
  kind: string;
  policy: string;
  step: number;
  created: number;
  bytes: number;
  model_bytes: number;
  project: string;
  tags: string[];
  base_model: string;
  weights: "whole" | "lora" | "none";
  lora_rank: number | null;
  published: string[];
  lineage: string[];
  evaluations: Evaluation[];
  /** By setting: the place in `evaluations` of the one that counts in comparisons. */
  compared: Record<string, number>;
  /** The value that sorts the list, if a metric does. */
  ranked: { metric: string; setting: string; value: number } | null;
}
