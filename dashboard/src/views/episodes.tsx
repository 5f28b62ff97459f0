// Episodes word by word: of training, by group with their rewards, and of evaluations. The newest step is followed.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked, useHeard } from "../hooks.ts";
import { job as path } from "../lib/api.ts";
import type { Beside, Follow } from "../lib/follow.ts";
import type { JobDetail } from "../lib/types.ts";
import { duration, short } from "../lib/words.ts";
import { Empty, Facts, Said } from "../parts.tsx";
import { Legend, TokenText, type Colour, type Tokens } from "../tokens.tsx";

interface Message {
  role: string;
  content: string;
}

interface View {
  seat: string;
  stream: string;
  reward: number;
  messages: Message[];
  tokens?: Tokens | null;
}

interface Episode {
  group: number;
  sample: number;
  worker: string;
  versions: string[];
  reward: number;
  /** Of all samples of the group, by seat. */
  group_rewards?: Record<string, number[]>;
  scores: Record<string, number>;
  metrics: Record<string, number>;
  ending: string;
  stops: string[];
  tokens: number;
  turns: number;
  seconds: number;
  views: View[];
}

interface Exam {
  index: number;
  reward: number;
  metrics: Record<string, number>;
  ending: string;
  messages: Message[];
  /** Of old ones, and beyond the first few: none. */
  views?: { seat: string; stream: string; tokens: Tokens }[];
}

interface Answer {
  steps: number[];
  step: number | null;
  rollouts?: Episode[];
  transcripts?: Exam[];
}

type Kind = "rollouts" | "transcripts";
const HEARD: Beside[] = ["rollouts"];
const KINDS: Record<Kind, string> = { rollouts: "training", transcripts: "evaluations" };
/** Nothing is trained on evaluations. */
const COLOURS: Record<Kind, Colour[]> = {
  rollouts: ["text", "mask", "logprob", "advantage", "version"],
  transcripts: ["text", "mask", "logprob", "version"],
};

export function Episodes({ job, follow }: { job: JobDetail; follow: Follow | null }): JSX.Element {
  const [kind, setKind] = useState<Kind>(job.kind === "eval" ? "transcripts" : "rollouts");
  const [step, setStep] = useState<number | null>(null);
  const [colour, setColour] = useState<Colour>("text");
  const query = step === null ? "" : `?step=${step}`;
  const { value, problem, again } = useAsked<Answer>(path(job.id, `/${kind}${query}`), step === null ? 4 : 0);
  useHeard(step === null ? follow : null, HEARD, again);
  const shown = COLOURS[kind].includes(colour) ? colour : "text";
  const steps = value?.steps ?? [];
  const at = steps.indexOf(value?.step ?? -1);
  return (
    <>
      <div class="bar">
        <span class="choice" role="group" aria-label="Of">
          {(["rollouts", "transcripts"] as Kind[]).map((one) => (
            <button
              key={one}
              aria-pressed={one === kind}
              onClick={() => {
                setKind(one);
                setStep(null);
              }}
            >
              {KINDS[one]}
            </button>
          ))}
        </span>
        <button aria-label="Earlier step" disabled={at <= 0} onClick={() => setStep(steps[at - 1]!)}>
          ‹
        </button>
        <input
          type="range"
          aria-label="Step"
          min={0}
          max={Math.max(0, steps.length - 1)}
          value={Math.max(0, at)}
          disabled={!steps.length}
          onChange={(event) => setStep(steps[Number(event.currentTarget.value)] ?? null)}
        />
        <button aria-label="Later step" disabled={at < 0 || at >= steps.length - 1} onClick={() => setStep(steps[at + 1]!)}>
          ›
        </button>
        <b>{value?.step === null || value === null ? "" : `step ${value.step}`}</b>
        <label class="check">
          <input type="checkbox" checked={step === null} onChange={(event) => setStep(event.currentTarget.checked ? null : (value?.step ?? null))} /> follow
          the newest
        </label>
        <span class="choice" role="group" aria-label="Colour tokens by">
          {COLOURS[kind].map((one) => (
            <button key={one} aria-pressed={one === shown} onClick={() => setColour(one)}>
              {one}
            </button>
          ))}
        </span>
        <Legend colour={shown} />
      </div>
      <Said problem={problem} />
      {!value && !problem && <Empty>…</Empty>}
      {value?.step === null && (
        <Empty>{kind === "rollouts" ? "None is kept yet (rollout.transcripts of each step)." : "No evaluation yet ([validation] in the spec)."}</Empty>
      )}
      {groups(value?.rollouts ?? []).map(([group, episodes]) => (
        <Group key={group} number={group} episodes={episodes} colour={shown} />
      ))}
      {(value?.transcripts ?? []).map((one) => (
        <ExamCard key={one.index} exam={one} colour={shown} />
      ))}
    </>
  );
}

function groups(episodes: Episode[]): [number, Episode[]][] {
  const found = new Map<number, Episode[]>();
  for (const one of episodes) found.set(one.group, [...(found.get(one.group) ?? []), one]);
  return [...found];
}

function Group({ number, episodes, colour }: { number: number; episodes: Episode[]; colour: Colour }): JSX.Element {
  const seats = Object.entries(episodes[0]?.group_rewards ?? { "": episodes.map((one) => one.reward) });
  const read = new Set(episodes.map((one) => one.sample));
  return (
    <section class="card group">
      <h2>
        Group {number}
        {seats.map(([seat, rewards]) => (
          <Rewards key={seat} seat={seat} rewards={rewards} read={read} />
        ))}
      </h2>
      {episodes.map((one) => (
        <EpisodeCard key={one.sample} episode={one} colour={colour} />
      ))}
    </section>
  );
}

/** A bar per sample; those that can be read are marked. */
function Rewards({ seat, rewards, read }: { seat: string; rewards: number[]; read: Set<number> }): JSX.Element {
  const low = Math.min(0, ...rewards);
  const high = Math.max(low + 1e-9, 0, ...rewards.map(Math.abs), rewards.every((one) => one <= 1) ? 1 : 0);
  const mean = rewards.reduce((sum, one) => sum + one, 0) / rewards.length;
  return (
    <>
      {seat && <small class="dim">{seat}</small>}
      <span class="rewards" role="img" aria-label={`rewards ${rewards.map(short).join(", ")}`}>
        {rewards.map((reward, sample) => (
          <i key={sample} class={read.has(sample) ? "read" : ""} title={`sample ${sample}: ${short(reward)}`}>
            <i class={reward < 0 ? "below" : ""} style={{ height: `${Math.min(100, (Math.abs(reward) / (high - low)) * 100)}%` }} />
          </i>
        ))}
      </span>
      <small class="dim">
        {rewards.length} samples, mean {short(mean)}
      </small>
    </>
  );
}

function EpisodeCard({ episode, colour }: { episode: Episode; colour: Colour }): JSX.Element {
  const many = episode.views.length > 1;
  return (
    <article>
      <Facts
        of={[
          ["Sample", String(episode.sample)],
          ["Reward", <b key="r">{short(episode.reward)}</b>],
          ["Ending", episode.ending],
          ["Stops", [...new Set(episode.stops)].join(", ")],
          ["Turns", String(episode.turns)],
          ["Tokens", String(episode.tokens)],
          ["Weights", episode.versions.join(", ")],
          ["Time", duration(episode.seconds)],
          ["Worker", episode.worker],
          ...pairs(episode.metrics),
          ...pairs(episode.scores),
        ]}
      />
      {episode.views.map((view) => (
        <div key={`${view.seat}/${view.stream}`}>
          {many && (
            <h3>
              {view.seat || "player"} {view.stream} · {short(view.reward)}
            </h3>
          )}
          {colour !== "text" && view.tokens ? <TokenText tokens={view.tokens} colour={colour} /> : <Talk messages={view.messages} />}
          {colour !== "text" && !view.tokens && <NotKept />}
        </div>
      ))}
    </article>
  );
}

function NotKept(): JSX.Element {
  return <small class="dim">The tokens of this one were not kept.</small>;
}

function ExamCard({ exam, colour }: { exam: Exam; colour: Colour }): JSX.Element {
  const views = (colour !== "text" && exam.views) || [];
  return (
    <section class="card group">
      <article>
        <Facts
          of={[["Episode", String(exam.index)], ["Reward", <b key="r">{short(exam.reward)}</b>], ["Ending", exam.ending], ...pairs(exam.metrics)]}
        />
        {views.map((view) => (
          <div key={`${view.seat}/${view.stream}`}>
            {views.length > 1 && (
              <h3>
                {view.seat || "player"} {view.stream}
              </h3>
            )}
            <TokenText tokens={view.tokens} colour={colour} />
          </div>
        ))}
        {views.length === 0 && <Talk messages={exam.messages} />}
        {colour !== "text" && views.length === 0 && <NotKept />}
      </article>
    </section>
  );
}

function Talk({ messages }: { messages: Message[] }): JSX.Element {
  return (
    <div class="talk">
      {messages.map((one, i) => (
        <p key={i} class={`message ${one.role}`}>
          <small>{one.role}</small>
          <span class="words">{one.content}</span>
        </p>
      ))}
    </div>
  );
}

function pairs(numbers: Record<string, number>): [string, string][] {
  return Object.entries(numbers).map(([name, value]) => [name, short(value)]);
}
