// Who plays which seat of an episode that a person plays: the person, or a bot of the environment.

import type { Json } from "./types.ts";

/** Who may play an environment with one config. Without seats: only the server that plays it knows them. */
export interface Playable {
  seats: string[];
  bots: string[];
  /** The bot of each seat that was asked for; empty: the person. */
  players: Record<string, string>;
}

/** The bot of each entry of a job's [seats], by seat or pattern; empty for other players. */
export function botsOfJob(seats: Json | undefined): Record<string, string> {
  return Object.fromEntries(Object.entries(table(seats)).map(([seat, player]) => [seat, String(table(player)["bot"] ?? "")]));
}

function table(value: Json | undefined): Record<string, Json> {
  return value && typeof value === "object" && !Array.isArray(value) ? value : {};
}

/** The seats to choose for, each with its player. `entries`: of a job. `picks`: what the person chose. */
export function choicesOf(playable: Playable, entries: Record<string, string>, picks: Record<string, string>): Record<string, string> {
  const before = playable.seats.length ? playable.players : entries;
  return Object.fromEntries(Object.entries(before).map(([seat, bot]) => [seat, picks[seat] ?? bot]));
}

/** Whether no seat is left to the person. */
export function botsOnly(choices: Record<string, string>): boolean {
  const players = Object.values(choices);
  return players.length > 0 && players.every(Boolean);
}

/** The seats that bots play, as a request names them. */
export function botSeats(choices: Record<string, string>): Record<string, string> {
  return Object.fromEntries(Object.entries(choices).filter(([, bot]) => bot));
}
