// Curves of a Tinker server: its trainer's, and those of its clients' models, each by the passes of the model itself.

import { shortModel } from "../tinker.ts";
import type { Panel } from "./panels.ts";
import { metric, type Axis, type Line, type Metrics } from "./series.ts";

/** Models that are drawn, the last trained ones. */
export const MOST = 8;
const NAME = /^models\/(.+)\/[^/]+$/;

/** Models with metrics, those with the newest points. */
export function modelsIn({ sources }: Metrics, most = MOST): string[] {
  const newest = new Map<string, number>();
  for (const points of sources.values())
    for (const { time, values } of points)
      for (const name in values) {
        const id = NAME.exec(name)?.[1];
        if (id) newest.set(id, Math.max(time, newest.get(id) ?? 0));
      }
  return [...newest].sort(([, a], [, b]) => b - a).slice(0, most).map(([id]) => id).sort();
}

const ofModels =
  (name: string) =>
  (joined: Metrics, axis: Axis): Line[] =>
    modelsIn(joined).map((id) => ({ ...metric(joined, `models/${id}/${name}`, axis), label: shortModel(id) }));

const ofTrainer =
  (name: string, label: string) =>
  (joined: Metrics, axis: Axis): Line[] => [{ ...metric(joined, `trainer/${name}`, axis), label }];

const WHICH = `of the ${MOST} models that were trained last`;

export const MODEL_PANELS: Panel[] = [
  { title: "Loss of models", about: `Loss of a token in passes ${WHICH}`, lines: ofModels("loss") },
  { title: "Tokens of models", about: `Tokens in passes ${WHICH}, since the point before`, lines: ofModels("tokens"), positive: true },
  { title: "Queue time of models", about: `Seconds that passes waited for those of others, ${WHICH}`, lines: ofModels("queue_seconds"), positive: true },
  { title: "Queue time", about: "Seconds that the passes of all clients waited, on average", lines: ofTrainer("queue_seconds", "waiting"), positive: true },
  { title: "Adapters", about: "Models in the trainer's memory", lines: ofTrainer("models", "models"), positive: true },
];
