// Which curves a job shows, and of which metrics they are made (docs/metrics.md has them all).

import { opponentsIn } from "./payoffs.ts";
import { column, metric, names, shareOf, together, type Axis, type Line, type Metrics } from "./series.ts";

export interface Panel {
  title: string;
  /** What it is, in a sentence. */
  about: string;
  lines: (joined: Metrics, axis: Axis) => Line[];
  /** Never below 0. */
  positive?: boolean;
}

const OURS = new Set(
  ("groups trajectories tokens entropy lr ess loss clip_share zero_variance step_seconds train_seconds grad_norm " +
    "rollout_workers tool_calls tool_errors rows epochs accuracy").split(" "),
);

/** Phases of episodes; those with "of which" are parts of the one before them. */
const PHASES = {
  "rollout/open_s": "opening",
  "rollout/start_s": "of which start",
  "rollout/generate_s": "model",
  "rollout/env_s": "environment",
  "rollout/tool_s": "of which tools",
  "rollout/verify_s": "of which grading",
};
const WHOLE = ["rollout/open_s", "rollout/generate_s", "rollout/env_s"];

const named =
  (...wanted: [string, string][]) =>
  (joined: Metrics, axis: Axis): Line[] =>
    wanted.map(([name, label]) => ({ ...metric(joined, name, axis), label }));

const summed =
  (...wanted: [string, string][]) =>
  (joined: Metrics, axis: Axis): Line[] =>
    wanted.map(([name, label]) => ({ ...together(joined, name, axis), label }));

type Around = (v: Record<string, number>) => [number, number];

function spread(joined: Metrics, axis: Axis, mean: string, label: string, around: Around): Line {
  const edge = (which: 0 | 1): number[] =>
    column(joined, mean, axis, (p) => (p.values[mean] === undefined ? undefined : around(p.values)[which])).y;
  return { ...metric(joined, mean, axis), low: edge(0), high: edge(1), label };
}

const val = (joined: Metrics, axis: Axis, name: string, label: string): Line => ({
  ...spread(joined, axis, name, label, (v) => {
    const base = name.replace(/\/mean$/, "");
    return [v[`${base}/low`] ?? v[name]!, v[`${base}/high`] ?? v[name]!];
  }),
  dots: true,
});

export const PANELS: Panel[] = [
  {
    title: "Reward",
    about: "Mean reward of the batch, plus and minus one standard deviation",
    lines: (joined, axis) => [
      spread(joined, axis, "reward/mean", "reward", (v) => {
        const std = v["reward/std"] ?? 0;
        return [
          Math.max(v["reward/mean"]! - std, v["reward/min"] ?? -Infinity),
          Math.min(v["reward/mean"]! + std, v["reward/max"] ?? Infinity),
        ];
      }),
      val(joined, axis, "val/reward/mean", "validation"),
    ],
  },
  {
    title: "Success",
    about: "Metrics of the environment: mean over the batch and in evaluations",
    lines: (joined, axis) => {
      const own = [...names(joined).keys()].filter((name) => !name.includes("/") && !OURS.has(name)).sort();
      const wanted = own.slice(0, 4);
      return wanted.flatMap((name) => [
        { ...metric(joined, name, axis), label: name },
        val(joined, axis, `val/${name}`, `validation ${name}`),
      ]);
    },
  },
  {
    title: "Win rate",
    about: "Share of evaluation episodes won, by opponent, with its interval; a draw counts as half a win",
    lines: (joined, axis) => {
      const opponents = opponentsIn(joined).map((name) => val(joined, axis, `val/winrate/${name}`, `against ${name}`));
      return opponents.length ? opponents : [val(joined, axis, "val/winrate", "won")];
    },
    positive: true,
  },
  {
    title: "Rating",
    about: "Elo rating of the weights from all evaluations, plus and minus its standard error. The first bot has 0; without bots, the first checkpoint has",
    lines: (joined, axis) => [
      {
        ...spread(joined, axis, "val/rating", "rating", (v) => {
          const error = v["val/rating/error"] ?? 0;
          return [v["val/rating"]! - error, v["val/rating"]! + error];
        }),
        dots: true,
      },
    ],
  },
  {
    title: "Loss",
    about: "Policy loss, KL term, critic loss, and loss on rows",
    lines: (joined, axis) => [
      ...named(["loss/policy", "policy"], ["loss/kl", "KL term"], ["loss/value", "value"], ["loss", "loss"])(joined, axis),
      val(joined, axis, "val/loss", "validation"),
    ],
  },
  {
    title: "KL",
    about: "Estimated KL to the sampling policy (ratio/k3), the reference and the teacher",
    lines: named(["ratio/k3", "sampler"], ["loss/kl", "reference"], ["teacher/kl", "teacher"]),
  },
  { title: "Entropy", about: "Entropy of the policy at the sampled tokens, in nats", lines: named(["entropy", "entropy"]) },
  {
    title: "Mismatch",
    about: "Difference between trainer and engine logprobs: same weights (numerics), all tokens (drift)",
    lines: named(["mismatch/mean", "same weights"], ["drift/mean", "all tokens"]),
    positive: true,
  },
  {
    title: "Off-policy",
    about: "Effective sample size of the importance ratios; share of clipped tokens",
    lines: named(["ess", "ESS"], ["clip_share", "clipped"], ["ratio/outside", "outside 0.9 to 1.1"]),
    positive: true,
  },
  {
    title: "Staleness",
    about: "Versions between a trajectory's oldest token and the trainer: mean and range",
    lines: (joined, axis) => [spread(joined, axis, "staleness/mean", "staleness", (v) => [v["staleness/min"] ?? 0, v["staleness/max"] ?? 0])],
    positive: true,
  },
  {
    title: "Opponent lag",
    about: "Steps that opponents have made since they played a match: mean and largest of the batch",
    lines: (joined, axis) => [spread(joined, axis, "opponent_lag/mean", "opponent lag", (v) => [0, v["opponent_lag/max"] ?? 0])],
    positive: true,
  },
  {
    title: "Tokens per second",
    about: "Generated by all rollout workers, and trained on",
    lines: (joined, axis) => [
      ...summed(["rollout/tokens_per_s", "generated"])(joined, axis),
      ...named(["trainer/tokens_per_s", "trained"])(joined, axis),
      ...summed(["serving/tokens_per_s", "served"])(joined, axis),
    ],
    positive: true,
  },
  {
    title: "Trainer waits",
    about: "Share of the trainer's step spent waiting for trajectories",
    lines: named(["trainer/wait_share", "waits"]),
    positive: true,
  },
  {
    title: "Episode time",
    about: "How episodes spend their time: before the first observation, in the model, in the environment, and of that in tools",
    lines: (joined, axis) =>
      Object.entries(PHASES).map(([name, label]) => ({ ...shareOf(joined, name, WHOLE, axis), label })),
    positive: true,
  },
  {
    title: "Swap seconds",
    about: "Duration of a weight swap to the last worker's answer, and its phases",
    lines: named(
      ["swap/seconds", "whole"],
      ["swap/transfer_s", "transfer"],
      ["swap/pause_s", "pause"],
      ["swap/load_s", "load"],
      ["swap/resume_s", "resume"],
    ),
    positive: true,
  },
  {
    title: "Step seconds",
    about: "Time between steps; computation alone",
    lines: named(["step_seconds", "step"], ["train_seconds", "computing"]),
    positive: true,
  },
  {
    title: "Queues",
    about: "Groups waiting to be trained; groups being generated",
    lines: named(["queue/pending_groups", "pending"], ["queue/running_groups", "running"]),
    positive: true,
  },
  {
    title: "Response length",
    about: "Sampled tokens per sample and seat",
    lines: named(["response_length/mean", "mean"], ["response_length/max", "longest"]),
    positive: true,
  },
  { title: "Gradient norm", about: "Gradient norm before clipping", lines: named(["grad_norm", "norm"]), positive: true },
  { title: "Learning rate", about: "Learning rate of the step", lines: (joined, axis) => [{ ...metric(joined, "lr", axis), label: "rate", exact: true }], positive: true },
  {
    title: "Preference",
    about: "dpo: reward margin, and the share of pairs where it is positive",
    lines: named(["rewards/margin", "margin"], ["rewards/accuracy", "accuracy"]),
  },
  { title: "Token accuracy", about: "sft: share of tokens with the highest probability", lines: named(["accuracy", "accuracy"]) },
  {
    title: "Requests",
    about: "Inference requests in the engine, and waiting for it",
    lines: summed(["serving/running", "running"], ["serving/waiting", "waiting"]),
    positive: true,
  },
];

/** Any metric by its own name. */
export function single(name: string): Panel {
  const rate = /^(rollout|env|serving|reference)\/.*_per_s$/.test(name);
  const ofWorkers = /^(rollout|env|serving|reference)\//.test(name);
  return {
    title: name,
    about: ofWorkers ? `${rate ? "sum" : "mean"} over workers` : "see docs/metrics.md",
    lines: (joined, axis) => [
      ofWorkers ? { ...together(joined, name, axis, rate ? "sum" : "mean"), label: name } : metric(joined, name, axis),
    ],
  };
}
