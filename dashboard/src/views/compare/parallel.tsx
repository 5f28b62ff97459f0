// Parallel coordinates: which settings the best runs have in common.

import type { JSX } from "preact";
import type { Run } from "../../lib/compare/compare.ts";
import { parallel } from "../../lib/compare/parallel.ts";
import { counted, short } from "../../lib/words.ts";
import { Figure } from "./figure.tsx";

const STEP = 150;
const HEIGHT = 220;
const EDGE = 34;

export function Parallel({ runs, metric, falls }: { runs: Run[]; metric: string; falls: boolean }): JSX.Element | null {
  const { axes, strands, left } = parallel(runs, metric, falls);
  if (axes.length < 2 || strands.length < 2) return null;
  const x = (axis: number): number => EDGE + axis * STEP;
  const y = (at: number): number => HEIGHT - EDGE - at * (HEIGHT - 2 * EDGE);
  const width = x(axes.length - 1) + STEP;
  return (
    <Figure title={`Settings and ${metric}; stronger lines are better runs`} look="parallel">
      <svg viewBox={`0 0 ${width} ${HEIGHT}`} width={width} height={HEIGHT} role="img" aria-label={`Settings of ${strands.length} runs, and ${metric}`}>
        {strands.map((one) => (
          <polyline
            key={one.id}
            points={one.at.flatMap((at, axis) => (at === null ? [] : [`${x(axis)},${y(at).toFixed(1)}`])).join(" ")}
            opacity={0.15 + 0.85 * (one.rank ?? 0)}
          >
            <title>{`${one.name} ${one.id}`}</title>
          </polyline>
        ))}
        {axes.map((axis, place) => (
          <g key={axis.name}>
            <line x1={x(place)} x2={x(place)} y1={y(0)} y2={y(1)} />
            <text x={x(place)} y={14}>
              {axis.name.split(".").slice(-2).join(".")}
            </text>
            {axis.marks.map((mark) => (
              <text key={mark.text} class="mark" x={x(place) + 5} y={y(mark.at) + 4}>
                {Number.isNaN(Number(mark.text)) ? mark.text.slice(0, 18) : short(Number(mark.text))}
              </text>
            ))}
          </g>
        ))}
      </svg>
      {left > 0 && <p class="dim">{counted(left, "more setting")} {left === 1 ? "differs" : "differ"}; the table above lists them all.</p>}
    </Figure>
  );
}
