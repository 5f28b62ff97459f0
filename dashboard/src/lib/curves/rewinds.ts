// Where a job went back to an earlier checkpoint because of an alarm.

import type { Axis } from "./series.ts";
import { short } from "../words.ts";
import type { Event } from "../types.ts";

/** A vertical line in a chart. */
export interface Mark {
  x: number;
  text: string;
}

export const REWOUND = "rewound";

/** By step the line stands at the checkpoint, from which the job continued; by time, where it went back. `begun`: time of
 * the job's first point. */
export function rewinds(events: readonly Event[], axis: Axis, begun: number): Mark[] {
  return events.flatMap((event) => {
    const { event: kind, from, to, alarm, time } = event;
    if (kind !== REWOUND || typeof from !== "number" || typeof to !== "number") return [];
    const x = axis === "step" ? to : time - begun;
    return Number.isFinite(x) ? [{ x, text: `from step ${short(from)} to ${short(to)} (${String(alarm)})` }] : [];
  });
}
