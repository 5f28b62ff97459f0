// The choice before an episode that a person plays: which seats are the person's, and which bots play the others.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { ask, Problem } from "../../lib/api.ts";
import { botSeats, botsOnly, choicesOf, type Playable } from "../../lib/seats.ts";
import type { Json } from "../../lib/types.ts";

export interface SeatChoice {
  /** Whether the seats have been read. */
  known: boolean;
  problem: Problem | null;
  /** Player of each seat, empty for the person; nothing where there is no choice. */
  choices: Record<string, string>;
  bots: string[];
  choose: (seat: string, bot: string) => void;
  /** What a request names. */
  taken: Record<string, string>;
  /** Why an episode with these players cannot begin; empty if it can. */
  wrong: string;
}

/** The seats of an environment with this config, read again when it changes. `entries`: bots that a job gives seats to. */
export function useSeats(environment: Record<string, Json> | null, entries: Record<string, string>): SeatChoice {
  const [playable, setPlayable] = useState<Playable | null>(null);
  const [problem, setProblem] = useState<Problem | null>(null);
  const [picks, setPicks] = useState<Record<string, string>>({});
  const body = environment && JSON.stringify({ environment, bots: entries });
  useEffect(() => {
    if (!body) return;
    const left = { it: false };
    ask<Playable>("/v1/plays/seats", { method: "POST", body: JSON.parse(body) as Json }).then(
      (found) => left.it || (setPlayable(found), setProblem(null)),
      (error: unknown) => left.it || (setPlayable(null), setProblem(error instanceof Problem ? error : new Problem(0, String(error)))),
    );
    return () => {
      left.it = true;
    };
  }, [body]);
  const all = playable ? choicesOf(playable, entries, picks) : {};
  const bots = [...new Set([...(playable?.bots ?? []), ...Object.values(entries).filter(Boolean)])];
  const choices = bots.length && playable?.seats.length !== 1 ? all : {};
  return {
    known: playable !== null,
    problem,
    choices,
    bots,
    choose: (seat, bot) => setPicks((before) => ({ ...before, [seat]: bot })),
    taken: botSeats(choices),
    wrong: playable?.seats.length && botsOnly(choices) ? "Bots play every seat: play at least one yourself." : "",
  };
}

/** One select for each seat. */
export function Seats({ of }: { of: SeatChoice }): JSX.Element {
  return (
    <>
      {Object.entries(of.choices).map(([seat, player]) => (
        <label key={seat}>
          {seat ? `Player of ${seat}` : "Player"}
          <select value={player} onChange={(event) => of.choose(seat, event.currentTarget.value)}>
            <option value="">You</option>
            {of.bots.map((bot) => (
              <option key={bot} value={bot}>
                {bot}
              </option>
            ))}
          </select>
        </label>
      ))}
    </>
  );
}
