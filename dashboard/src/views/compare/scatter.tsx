// A setting against how a metric ended, a point for each run.

import type { JSX } from "preact";
import { axisOver } from "../../lib/compare/axis.ts";
import { scatter, type Run } from "../../lib/compare/compare.ts";
import { COLOURS, type LineLook } from "../../lib/looks.ts";
import { short } from "../../lib/words.ts";
import { Figure } from "./figure.tsx";

const PLOT = { width: 440, height: 240, left: 58, right: 12, top: 10, bottom: 40 };
const TICKS = { x: 5, y: 4 };

export function Scatter({ path, metric, runs, looks }: { path: string; metric: string; runs: Run[]; looks: LineLook[] }): JSX.Element | null {
  const points = scatter(runs, path, metric);
  if (points.length < 2) return null;
  const across = axisOver(points.map((point) => point.x), TICKS.x, true);
  const up = axisOver(points.map((point) => point.y), TICKS.y, false);
  const x = (value: number): number => PLOT.left + across.place(value) * (PLOT.width - PLOT.left - PLOT.right);
  const y = (value: number): number => PLOT.height - PLOT.bottom - up.place(value) * (PLOT.height - PLOT.top - PLOT.bottom);
  const floor = PLOT.height - PLOT.bottom;
  return (
    <Figure title={`${metric} (last) by ${path}`} look="scatter">
      <svg viewBox={`0 0 ${PLOT.width} ${PLOT.height}`} role="img" aria-label={`${metric} by ${path}: ${points.map((one) => `${one.x}, ${short(one.y)}`).join("; ")}`}>
        {up.ticks.map((tick) => (
          <g key={tick}>
            <line x1={PLOT.left} x2={PLOT.width - PLOT.right} y1={y(tick)} y2={y(tick)} />
            <text class="up" x={PLOT.left - 6} y={y(tick) + 4}>
              {short(tick)}
            </text>
          </g>
        ))}
        {across.ticks.map((tick) => (
          <g key={tick}>
            <line x1={x(tick)} x2={x(tick)} y1={PLOT.top} y2={floor} />
            <text x={x(tick)} y={floor + 15}>
              {short(tick)}
            </text>
          </g>
        ))}
        <text class="name" x={(PLOT.left + PLOT.width - PLOT.right) / 2} y={PLOT.height - 6}>
          {path}
          {across.isLog ? " (logarithmic)" : ""}
        </text>
        {points.map((point) => (
          <circle key={point.label} cx={x(point.x)} cy={y(point.y)} r="5" style={{ fill: `var(${COLOURS[looks[point.run]!.colour]})` }}>
            <title>{`${point.label}: ${point.x}, ${short(point.y)}`}</title>
          </circle>
        ))}
      </svg>
    </Figure>
  );
}
