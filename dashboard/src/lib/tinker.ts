// Models of a Tinker server's clients: as the server lists them, and as people read them.

import { counted, short } from "./words.ts";

export interface ModelCheckpoint {
  /** tinker://MODEL/KIND/NAME */
  path: string;
  kind: string;
  name: string;
  step: number;
  created: number;
  bytes: number;
  expires: number | null;
  public: boolean;
}

export interface ServedModel {
  id: string;
  session: string;
  base: string;
  rank: number;
  /** Path of the checkpoint that it began with; empty: fresh weights. */
  start: string;
  created: number;
  used: number;
  /** Whether its client sends heartbeats. */
  alive: boolean;
  metadata: Record<string, string>;
  passes: number;
  steps: number;
  tokens: number;
  loss: number | null;
  curve: number[];
  /** Seconds that its newest passes waited for those of others. */
  queue_s: number;
  /** Commands without an answer. */
  waiting: number;
  waiting_for: string;
  checkpoints: ModelCheckpoint[];
}

export interface ServedModels {
  base: string;
  queue: string;
  models: ServedModel[];
  total: number;
  others: { models: number; alive: number; waiting: number } | null;
}

/** An id without most of its session: s-4f2a91:0 of s-4f2a91…:train:0. */
export function shortModel(id: string): string {
  const [session = "", kind, number] = id.split(":");
  return kind === "train" && number !== undefined ? `${session.slice(0, 8)}:${number}` : id;
}

/** Own models, those of other tenants, and the trainer's queue, in a line. */
export function summary({ models, total, others, queue }: ServedModels): string {
  const own = models.length < total ? `${models.length} of ${counted(total, "model")}` : counted(total, "model");
  const waiting = others?.waiting ? `, ${counted(others.waiting, "command")} waiting` : "";
  const rest = others?.models ? `other tenants: ${counted(others.models, "model")}, ${others.alive} with a client${waiting}` : "";
  return [own, queue, rest].filter(Boolean).join(" · ");
}

/** What a model's first command without an answer waits for, and how many there are. */
export function waits({ waiting, waiting_for }: Pick<ServedModel, "waiting" | "waiting_for">): string {
  return waiting ? `${waiting_for} (${counted(waiting, "command")})` : "";
}

/** How long passes wait for those of others: they are often much shorter than a second. */
export function queueTime(seconds: number): string {
  return seconds < 1 ? `${short(Math.round(seconds * 1e4) / 10)} ms` : `${short(seconds)} s`;
}

/** What a client types before it begins. `page`: the address of this page. */
export function connection(page: Pick<Location, "origin" | "pathname">): string[] {
  return ["pip install tinker", `export TINKER_BASE_URL=${page.origin}${page.pathname.replace(/\/$/, "")}`, "export TINKER_API_KEY=tml-KEY"];
}
