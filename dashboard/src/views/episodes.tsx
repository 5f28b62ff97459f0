// Episodes word by word: of training, by group with their rewards, and of evaluations. The newest step is followed.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked } from "../hooks.ts";
import { job as path } from "../lib/api.ts";
import type { JobDetail } from "../lib/types.ts";
import { duration, short } from "../lib/words.ts";
import { Empty, Facts, Said } from "../parts.tsx";

interface Message {
  role: string;
  content: string;
}

interface View {
  seat: string;
  stream: string;
  reward: number;
  messages: Message[];
}

interface Episode {
  group: number;
  sample: number;
  worker: string;
  versions: string[];
  reward: number;
  components: Record<string, Record<string, number>> | Record<string, number>;
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
}

interface Answer {
  steps: number[];
  step: number | null;
  rollouts?: Episode[];
  transcripts?: Exam[];
}

type Kind = "rollouts" | "transcripts";

export function Episodes({ job }: { job: JobDetail }): JSX.Element {
  const [kind, setKind] = useState<Kind>("rollouts");
  const [step, setStep] = useState<number | null>(null);
  const query = step === null ? "" : `?step=${step}`;
  const { value, problem } = useAsked<Answer>(path(job.id, `/${kind}${query}`), step === null ? 2 : 0);
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
              {one === "rollouts" ? "training" : "evaluations"}
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
      </div>
      <Said problem={problem} />
      {!value && !problem && <Empty>…</Empty>}
      {value?.step === null && (
        <Empty>{kind === "rollouts" ? "None is kept yet (rollout.transcripts of each step)." : "No evaluation yet ([validation] in the spec)."}</Empty>
      )}
      {groups(value?.rollouts ?? []).map(([group, episodes]) => (
        <Group key={group} number={group} episodes={episodes} />
      ))}
      {(value?.transcripts ?? []).map((one) => (
        <ExamCard key={one.index} exam={one} />
      ))}
    </>
  );
}

function groups(episodes: Episode[]): [number, Episode[]][] {
  const found = new Map<number, Episode[]>();
  for (const one of episodes) found.set(one.group, [...(found.get(one.group) ?? []), one]);
  return [...found];
}

function Group({ number, episodes }: { number: number; episodes: Episode[] }): JSX.Element {
  const rewards = episodes.map((one) => one.reward);
  const low = Math.min(0, ...rewards);
  const high = Math.max(1, ...rewards);
  return (
    <section class="card group">
      <h2>
        Group {number}
        <span class="rewards" role="img" aria-label={`rewards ${rewards.map(short).join(", ")}`}>
          {episodes.map((one) => (
            <i key={one.sample} title={`sample ${one.sample}: ${short(one.reward)}`}>
              <i class={one.reward < 0 ? "below" : ""} style={{ height: `${(Math.abs(one.reward) / (high - low)) * 100}%` }} />
            </i>
          ))}
        </span>
      </h2>
      {episodes.map((one) => (
        <EpisodeCard key={one.sample} episode={one} />
      ))}
    </section>
  );
}

function EpisodeCard({ episode }: { episode: Episode }): JSX.Element {
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
          <Talk messages={view.messages} />
        </div>
      ))}
    </article>
  );
}

function ExamCard({ exam }: { exam: Exam }): JSX.Element {
  return (
    <section class="card group">
      <article>
        <Facts
          of={[["Episode", String(exam.index)], ["Reward", <b key="r">{short(exam.reward)}</b>], ["Ending", exam.ending], ...pairs(exam.metrics)]}
        />
        <Talk messages={exam.messages} />
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
