// Episodes word by word: of training, by group with their rewards, and of evaluations. The newest step is followed.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useAsked, useHeard } from "../../hooks.ts";
import { job as path } from "../../lib/api.ts";
import type { Beside, Follow } from "../../lib/live/follow.ts";
import { conversation, evaluated, seatOf, type Message, type SeatTokens, type View } from "../../lib/match.ts";
import { policiesOf } from "../../lib/curves/policies.ts";
import type { JobDetail } from "../../lib/types.ts";
import { duration, short } from "../../lib/words.ts";
import { Choice, Empty, Facts, Said } from "../../parts.tsx";
import { Legend, TokenText, type Colour } from "../../tokens.tsx";
import { Match, Talk, type Images } from "./match.tsx";

interface Episode {
  group: number;
  sample: number;
  /** Of the data set. */
  row?: number;
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
  /** Messages of all views, in the order of play; of old ones, none. */
  order?: [number, number][];
  images?: Images;
}

export interface Exam {
  index: number;
  /** Which beginning it has, and which time it is played. */
  state?: number;
  sample?: number;
  /** Of the data set. */
  row?: number;
  /** Who played the other seats, where the evaluation has several opponents. */
  opponent?: string;
  /** 1: won, 0.5: drawn, 0: lost; where others have seats. */
  outcome?: number;
  solved: boolean;
  reward: number;
  /** Rewards, where several play. */
  seats?: Record<string, number>;
  metrics: Record<string, number>;
  ending: string;
  /** In the order of play. */
  messages: Message[];
  /** Of old ones, and beyond the first few: none. */
  views?: SeatTokens[];
  images?: Images;
}

interface Answer {
  steps: number[];
  step: number | null;
  /** Numbers of kept evaluation episodes, by outcome. */
  outcomes?: Record<string, number>;
  /** Of those with other players, by opponent and outcome. */
  opponents?: Record<string, Record<string, number>>;
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

/** `at`: the step that is shown first; empty: the newest. */
export function Episodes({ job, follow, at: first = "" }: { job: JobDetail; follow: Follow | null; at?: string }): JSX.Element {
  const [kind, setKind] = useState<Kind>(job.kind === "eval" ? "transcripts" : "rollouts");
  const [step, setStep] = useState<number | null>(/^\d+$/.test(first) ? Number(first) : null);
  const [colour, setColour] = useState<Colour>("text");
  const policies = policiesOf(job);
  const [policy, setPolicy] = useState(policies[0] ?? "");
  const [outcome, setOutcome] = useState("all");
  const [opponent, setOpponent] = useState("");
  const filter = kind === "transcripts" ? { outcome: outcome === "all" ? "" : outcome, opponent } : {};
  const asked = new URLSearchParams(Object.entries({ step: step === null ? "" : String(step), policy, ...filter }).filter(([, value]) => value));
  const query = asked.size ? `?${asked}` : "";
  const { value, problem, again } = useAsked<Answer>(path(job.id, `/${kind}${query}`), step === null ? 4 : 0);
  useHeard(step === null ? follow : null, HEARD, again);
  const shown = COLOURS[kind].includes(colour) ? colour : "text";
  const steps = value?.steps ?? [];
  const opponents = Object.keys(value?.opponents ?? {}).filter(Boolean);
  const at = steps.indexOf(value?.step ?? -1);
  return (
    <>
      <div class="bar">
        <Choice<Kind> quiet label="Of" value={kind} of={["rollouts", "transcripts"]} say={(one) => KINDS[one]} choose={(one) => (setKind(one), setStep(null))} />
        {policies.length > 0 && <Choice label="policy" value={policy} of={policies} choose={(name) => (setPolicy(name), setOpponent(""), setStep(null))} />}
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
        <Choice quiet label="Colour tokens by" value={shown} of={COLOURS[kind]} choose={setColour} />
        <Legend colour={shown} />
      </div>
      {value?.outcomes && value.step !== null && (
        <div class="bar outcomes">
          <Choice
            label="outcome"
            value={outcome}
            of={["all", ...Object.keys(value.outcomes)]}
            say={(one) => (one === "all" ? one : `${one} ${value.outcomes?.[one] ?? 0}`)}
            choose={setOutcome}
          />
          {opponents.length > 0 && (
            <Choice
              label="against"
              value={opponent}
              of={["", ...opponents]}
              say={(one) => (one ? `${one} (${games(value.opponents?.[one] ?? {})})` : "all")}
              choose={setOpponent}
            />
          )}
        </div>
      )}
      <Said problem={problem} />
      {!value && !problem && <Empty>Loading…</Empty>}
      {value?.outcomes && value.step !== null && !value.transcripts?.length && <Empty>No kept episode of this step had this outcome. Choose another one above, or another step.</Empty>}
      {value?.step === null && (
        <Empty>
          {kind === "rollouts" ? (
            <>
              No episodes yet: some of each training step appear here, as many as <code>rollout.transcripts</code> says.
            </>
          ) : (
            <>
              No evaluations: a table <code>[validation]</code> in the spec asks for some. <code>opentinker eval {job.id}</code> evaluates checkpoints in a job of its own.
            </>
          )}
        </Empty>
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

/** `3 won, 0 drawn, 1 lost` */
function games(counts: Record<string, number>): string {
  return Object.entries(counts)
    .map(([name, count]) => `${count} ${name}`)
    .join(", ");
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
  const acts = many && episode.order ? conversation(episode.views, episode.order) : null;
  return (
    <article>
      <Facts
        of={[
          ["Sample", episode.sample],
          episode.row !== undefined && ["Row", episode.row],
          ["Reward", <b key="r">{short(episode.reward)}</b>],
          ["Ending", episode.ending],
          ["Stops", [...new Set(episode.stops)].join(", ")],
          ["Turns", episode.turns],
          ["Tokens", episode.tokens],
          ["Weights", episode.versions.join(", ")],
          ["Time", duration(episode.seconds)],
          ["Worker", episode.worker],
          ...pairs(episode.metrics),
          ...pairs(episode.scores),
        ]}
      />
      {acts && <Match seats={episode.views} acts={acts} colour={colour} images={episode.images} />}
      {!acts &&
        episode.views.map((view) => (
          <div key={`${view.seat}/${view.stream}`}>
            {many && (
              <h3>
                {seatOf(view)} · {short(view.reward)}
              </h3>
            )}
            {colour !== "text" && view.tokens ? <TokenText tokens={view.tokens} colour={colour} /> : <Talk messages={view.messages} images={episode.images} />}
            {colour !== "text" && !view.tokens && <NotKept />}
          </div>
        ))}
    </article>
  );
}

function NotKept(): JSX.Element {
  return <small class="dim">The tokens of this episode were not kept.</small>;
}

function ExamCard({ exam, colour }: { exam: Exam; colour: Colour }): JSX.Element {
  const match = evaluated(exam.messages, exam.views ?? [], exam.seats ?? {});
  const views = (colour !== "text" && !match && exam.views) || [];
  return (
    <section class="card group">
      <article>
        <Facts
          of={[
            ["Episode", exam.index],
            exam.row !== undefined && ["Row", exam.row],
            exam.opponent && ["Against", exam.opponent],
            exam.outcome !== undefined && ["Outcome", exam.outcome === 1 ? "won" : exam.outcome === 0 ? "lost" : "drawn"],
            ["Reward", <b key="r">{short(exam.reward)}</b>],
            ["Solved", exam.solved ? "yes" : "no"],
            ["Ending", exam.ending],
            ...pairs(exam.metrics),
          ]}
        />
        {views.map((view) => (
          <div key={`${view.seat}/${view.stream}`}>
            {views.length > 1 && (
              <h3>
                {view.seat || "player"} {view.stream}
                {view.policy && <small class="dim"> played by {view.policy}</small>}
              </h3>
            )}
            {view.tokens && <TokenText tokens={view.tokens} colour={colour} />}
          </div>
        ))}
        {match && <Match seats={match.seats} acts={match.acts} colour={colour} images={exam.images} />}
        {!match && views.length === 0 && <Talk messages={exam.messages} images={exam.images} />}
        {colour !== "text" && !exam.views?.length && <NotKept />}
      </article>
    </section>
  );
}

function pairs(numbers: Record<string, number>): [string, string][] {
  return Object.entries(numbers).map(([name, value]) => [name, short(value)]);
}
