// An episode that a person plays: the prompts of the seats that act, fields for their answers, and the rewards.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { useDoing } from "../../hooks.ts";
import { ask } from "../../lib/api.ts";
import type { Json, PlayedEpisode, PlayedPrompt } from "../../lib/types.ts";
import { short } from "../../lib/words.ts";
import { Empty, Said } from "../../parts.tsx";
import { Talk } from "../job/match.tsx";

export interface Start {
  environment: Record<string, Json>;
  row: number;
  seed: number;
  /** Seats that bots play. */
  bots: Record<string, string>;
}

interface Line {
  seat: string;
  role: string;
  content: string;
  images: string[];
}

interface PlayProps {
  start: Start;
  leave: () => void;
}

/** Episodes of one start state, one after the other. */
export function Play({ start, leave }: PlayProps): JSX.Element {
  const [turn, setTurn] = useState(0);
  return <Episode key={turn} start={start} leave={leave} again={() => setTurn(turn + 1)} />;
}

function Episode({ start, leave, again }: PlayProps & { again: () => void }): JSX.Element {
  const [episode, setEpisode] = useState<PlayedEpisode | null>(null);
  const [talk, setTalk] = useState<Line[]>([]);
  const [total, setTotal] = useState<Record<string, number>>({});
  const { doing, problem, act } = useDoing();
  const open = useRef<string | null>(null); // what has to be ended when the view goes away
  const gone = useRef(false);
  const end = (): void => {
    if (open.current) void ask(`/v1/plays/${open.current}`, { method: "DELETE" }).catch(() => undefined); // it ends by itself
    open.current = null;
  };
  const take = (next: PlayedEpisode, said: Line[], actor: string): void => {
    open.current = next.done ? null : next.id;
    if (gone.current) return end(); // it has opened after the reader left
    const seen = next.prompts.flatMap((prompt) => prompt.messages.map((one) => ({ seat: prompt.seat, ...one })));
    setTalk((before) => [...before, ...said, ...seen]);
    setTotal((before) => rewarded(before, next, actor));
    setEpisode(next);
  };
  useEffect(() => {
    act(async () => take(await ask<PlayedEpisode>("/v1/plays", { method: "POST", body: { ...start } as Json }), [], ""));
    return () => {
      gone.current = true;
      end();
    };
  }, []);
  const answer = (texts: string[], calls: Call[]): void => {
    const prompts = episode!.prompts;
    const said = prompts.map((prompt, at) => ({ seat: prompt.seat, role: "assistant", content: spoken(texts[at]!, calls[at]!), images: [] }));
    const actions = texts.map((text, at) => ({ text, tool_calls: calls[at]!.name ? [calls[at]!] : [] }));
    const body = { turn: episode!.turn, actions } as unknown as Json;
    act(async () => take(await ask<PlayedEpisode>(`/v1/plays/${episode!.id}/turns`, { method: "POST", body }), said, prompts[0]!.seat));
  };
  const scores = Object.entries(total).map(([seat, reward]) => `${seat ? `${seat}: ` : ""}${short(reward)}`);
  return (
    <div class="play">
      <Talk messages={talk.map((one) => ({ ...one, role: one.seat ? `${one.role} · ${one.seat}` : one.role }))} images={pictures(talk)} />
      <Said problem={problem} />
      {!episode && !problem && <Empty>An env worker is opening it…</Empty>}
      {episode && (
        <p role="status">
          {episode.error ? `The episode failed: ${episode.error}. ` : episode.done ? (episode.truncated ? "A limit ended the episode. " : "The episode has ended. ") : ""}
          Reward {scores.join(", ") || "0"}.
        </p>
      )}
      {episode && !episode.done && <Answers key={episode.turn} prompts={episode.prompts} doing={doing} answer={answer} />}
      <div class="bar">
        {episode?.done && <button onClick={again}>Play again</button>}
        <button onClick={leave}>{episode?.done ? "Close" : "End"}</button>
      </div>
    </div>
  );
}

interface Call {
  name: string;
  arguments: Record<string, Json>;
}

interface AnswersProps {
  prompts: PlayedPrompt[];
  doing: boolean;
  answer: (texts: string[], calls: Call[]) => void;
}

/** One field for each seat that acts, and where it may call tools one for a call. */
function Answers({ prompts, doing, answer }: AnswersProps): JSX.Element {
  const [texts, setTexts] = useState(prompts.map(() => ""));
  const [tools, setTools] = useState(prompts.map(() => ""));
  const [given, setGiven] = useState(prompts.map(() => ""));
  const [wrong, setWrong] = useState("");
  const put = (list: string[], at: number, text: string): string[] => list.map((one, place) => (place === at ? text : one));
  const send = (event: Event): void => {
    event.preventDefault();
    try {
      const calls = tools.map((name, at) => ({ name, arguments: name ? (JSON.parse(given[at] || "{}") as Record<string, Json>) : {} }));
      answer(texts, calls);
    } catch (error) {
      setWrong(`The arguments of a call must be JSON: ${String(error)}`);
    }
  };
  return (
    <form class="fields" onSubmit={send}>
      {prompts.map((prompt, at) => (
        <div key={prompt.seat}>
          <label>
            {prompt.seat ? `Answer of ${prompt.seat}` : "Your answer"}
            <textarea rows={3} maxLength={50_000} value={texts[at]} onInput={(event) => setTexts(put(texts, at, event.currentTarget.value))} />
          </label>
          {prompt.tools.length > 0 && (
            <>
              <label>
                Call
                <select value={tools[at]} onChange={(event) => setTools(put(tools, at, event.currentTarget.value))}>
                  <option value="">no tool</option>
                  {prompt.tools.map((tool) => (
                    <option key={tool.name} value={tool.name} title={tool.description}>
                      {tool.name}
                    </option>
                  ))}
                </select>
              </label>
              <label>
                Arguments, as JSON
                <input placeholder="{}" spellcheck={false} value={given[at]} onInput={(event) => setGiven(put(given, at, event.currentTarget.value))} />
              </label>
            </>
          )}
        </div>
      ))}
      <button disabled={doing}>Answer</button>
      {wrong && <p class="problem">{wrong}</p>}
    </form>
  );
}

function spoken(text: string, call: Call): string {
  return call.name ? `${text}\n${call.name}(${JSON.stringify(call.arguments)})`.trim() : text;
}

/** All rewards so far by seat. `actor`: who acted. */
function rewarded(before: Record<string, number>, next: PlayedEpisode, actor: string): Record<string, number> {
  const sums = { ...before };
  if (next.reward) sums[actor] = (sums[actor] ?? 0) + next.reward;
  for (const [seat, parts] of Object.entries(next.rewards)) {
    sums[seat] = (sums[seat] ?? 0) + Object.values(parts).reduce((sum, one) => sum + one, 0);
  }
  return sums;
}

function pictures(talk: Line[]): Record<string, string> {
  return Object.fromEntries(talk.flatMap((one) => one.images.map((data) => [data, data])));
}
