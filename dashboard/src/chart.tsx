// One chart: lines with bands, smoothing, a logarithmic scale, a picture and a table of it to take away.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { JSX } from "preact";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { csv } from "./lib/csv.ts";
import type { Mark } from "./lib/curves/rewinds.ts";
import { aligned, clamped, smoothed, type Axis, type Line } from "./lib/curves/series.ts";
import { COLOURS, PATTERNS, sampleOf, wrapped } from "./lib/looks.ts";
import { duration, fileName, save, short } from "./lib/words.ts";
import { coloured, useTheme } from "./theme.ts";

const HEIGHT = 180;

export interface Look {
  axis: Axis;
  smooth: number;
  log: boolean;
}

interface Props {
  title: string;
  about: string;
  lines: Line[];
  look: Look;
  positive?: boolean | undefined;
  /** Vertical lines. */
  marks?: readonly Mark[];
  /** What x counts on the axis "step". */
  unit?: string;
  /** Takes the chart away. */
  remove?: (() => void) | undefined;
}

const NONE: readonly Mark[] = [];

/** A line as the plot has it: itself, the edges of its band, and beneath a smoothed one what it was made of. */
interface Drawn {
  label: string;
  colour: string;
  line: Line;
  /** Its first column in the data. */
  at: number;
  raw: boolean;
}

export function Chart({ title, about, lines, look, positive, marks = NONE, unit = "step", remove }: Props): JSX.Element | null {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const zoomed = useRef(false);
  const marked = useRef(marks);
  marked.current = marks;
  const [wide, setWide] = useState(false);
  const [at, setAt] = useState<number | null>(null);
  const theme = useTheme();
  const [drawn, data] = useMemo(() => {
    const made = plan(lines, look);
    return [made, columns(made, look)];
  }, [lines, look]);
  const shape = JSON.stringify([drawn.map((d) => [d.label, d.at, d.line.dots]), look, wide, theme]);

  useEffect(() => {
    const box = place.current;
    if (!box || !drawn.length) return;
    const hover = (u: uPlot): void => setAt(u.cursor.idx ?? null);
    const zoom = (u: uPlot): void => void (zoomed.current = u.select.width > 0 || zoomed.current);
    const hooks = { setCursor: [hover], setSelect: [zoom], draw: [(u: uPlot): void => mark(u, marked.current)] };
    const made = new uPlot({ ...options(drawn, look, box.clientWidth, wide, Boolean(positive)), hooks }, data, box);
    made.over.addEventListener("dblclick", () => (zoomed.current = false));
    zoomed.current = false;
    plot.current = made;
    const watcher = new ResizeObserver(() => made.setSize({ width: box.clientWidth, height: heightOf(wide) }));
    watcher.observe(box);
    return () => {
      watcher.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    const now = plot.current;
    if (!now || now.data === data) return;
    now.setData(data, !zoomed.current); // whoever looks at a part of it goes on looking there
    if (zoomed.current) now.redraw();
  }, [data]);
  useEffect(() => {
    const now = plot.current;
    if (now && typeof now.scales["x"]?.min === "number") now.redraw(false); // before its first drawing it has no scale
  }, [marks]);

  if (!drawn.length) return null;
  const last = data[0]!.length - 1;
  const x = data[0]![at ?? last];
  return (
    <section class={wide ? "card chart wide" : "card chart"} data-chart={title}>
      <header>
        <h3 title={about}>{title}</h3>
        <span class="tools">
          <small>{x === undefined || x === null ? "" : look.axis === "step" ? `${unit} ${short(x)}` : duration(x)}</small>
          <button title="Save as CSV" aria-label={`${title} as CSV`} onClick={() => save(`${fileName(title)}.csv`, new Blob([csv(tableOf(drawn, look))], { type: "text/csv" }))}>
            csv
          </button>
          <button title="Save as PNG" aria-label={`${title} as PNG`} onClick={() => void picture(title, drawn, plot.current)}>
            png
          </button>
          <button aria-label={`${title}, larger`} aria-pressed={wide} onClick={() => setWide(!wide)}>
            {wide ? "–" : "+"}
          </button>
          {remove && (
            <button title="Remove from the comparison" aria-label={`Remove ${title}`} onClick={remove}>
              ×
            </button>
          )}
        </span>
      </header>
      <p class="legend">
        {drawn.map((one) => (
          <span key={one.label} class="key">
            <i style={{ background: sampleOf(one.colour, dashOf(one.line)) }} />
            {one.label} <b>{short(valueAt(one, data, at))}</b>
          </span>
        ))}
      </p>
      <div ref={place} class="plot" role="img" aria-label={[`${title}: ${about}`, ...marks.map(({ text }) => text)].join("; ")} />
    </section>
  );
}

/** Draw vertical lines. */
function mark(plot: uPlot, marks: readonly Mark[]): void {
  const { left, top, width, height } = plot.bbox;
  const pen = plot.ctx;
  pen.save();
  pen.strokeStyle = coloured()("--dim");
  pen.lineWidth = window.devicePixelRatio || 1;
  pen.setLineDash([2 * pen.lineWidth, 3 * pen.lineWidth]);
  for (const { x } of marks) {
    const at = Math.round(plot.valToPos(x, "x", true));
    if (at < left || at > left + width) continue;
    pen.beginPath();
    pen.moveTo(at, top);
    pen.lineTo(at, top + height);
    pen.stroke();
  }
  pen.restore();
}

/** Of a line of another job, beside ours. */
const OTHER = [5, 4];

function dashOf(line: Line): number[] {
  return line.other ? OTHER : PATTERNS[(line.pattern ?? 0) % PATTERNS.length]!;
}

function valueAt({ line, at: column }: Drawn, data: uPlot.AlignedData, at: number | null): number | undefined {
  if (at === null) return line.y[line.y.length - 1];
  const values = data[column]!;
  for (let i = at; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return values[i]!;
  return undefined;
}

function plan(lines: Line[], look: Look): Drawn[] {
  let column = 1;
  return lines
    .filter((line) => line.x.length)
    .map((line, i) => {
      const place = (line.colour ?? i) % COLOURS.length;
      const raw = look.smooth > 0 && !line.low && !line.dots && !line.exact && !line.other;
      const one = { label: line.label, colour: COLOURS[place]!, line, at: column, raw };
      column += 1 + (line.low ? 2 : 0) + (raw ? 1 : 0);
      return one;
    });
}

function columns(drawn: Drawn[], look: Look): uPlot.AlignedData {
  const above = (y: number): number | null => (look.log && y <= 0 ? null : y);
  const parts = drawn.map(({ line, raw }) => {
    const weight = line.dots || line.exact ? 0 : look.smooth;
    const main = smoothed(line.y, weight).map(above);
    const band = line.low && line.high ? [line.high, line.low].map((y) => smoothed(y, weight)) : [];
    const edges = look.log ? clamped(band) : band;
    return { x: line.x, ys: raw ? [main, ...edges, line.y.map(above)] : [main, ...edges] };
  });
  return aligned(parts) as uPlot.AlignedData;
}

function options(drawn: Drawn[], look: Look, width: number, wide: boolean, positive: boolean): uPlot.Options {
  const colour = coloured();
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  for (const { line, colour: name, label, raw } of drawn) {
    const stroke = colour(name);
    const dash = dashOf(line);
    const points = { show: Boolean(line.dots) || line.x.length < 2, size: 5, fill: stroke };
    series.push({ label, stroke, width: line.dots ? 1 : 1.75, spanGaps: true, points, ...(dash.length ? { dash } : {}) });
    const edge: uPlot.Series = { label: "", width: 0, spanGaps: true, points: { show: false } };
    if (line.low) {
      bands.push({ series: [series.length, series.length + 1], fill: `${stroke}26` });
      series.push(edge, edge);
    }
    if (raw) series.push({ ...edge, stroke: `${stroke}40`, width: 1 });
  }
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const values = (_: uPlot, splits: (number | null)[]): string[] => splits.map((v) => (v === null ? "" : short(v)));
  const time = (_: uPlot, splits: number[]): string[] => splits.map((v) => duration(v));
  return {
    width,
    height: heightOf(wide),
    legend: { show: false },
    cursor: { sync: { key: `curves-${look.axis}` }, points: { size: 6 }, drag: { x: true, y: false } },
    scales: {
      x: { time: false },
      y: look.log ? { distr: 3 } : { range: (_, low, high) => bounds(low, high, positive) },
    },
    axes: [
      { ...axis, size: 24, ...(look.axis === "time" ? { values: time } : { values }) },
      { ...axis, size: 52, values },
    ],
    series,
    bands,
  };
}

function bounds(low: number | null, high: number | null, positive: boolean): [number, number] {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [positive && low >= 0 ? 0 : low - room, high + room];
}

function heightOf(wide: boolean): number {
  return wide ? Math.max(HEIGHT, Math.round(window.innerHeight * 0.55)) : HEIGHT;
}

function tableOf(drawn: Drawn[], look: Look): string[][] {
  const [at, ...columns] = aligned(drawn.map(({ line }) => ({ x: line.x, ys: [line.y] })));
  const rows = at!.map((x, i) => [x, ...columns.map((column) => column[i] ?? "")].map(String));
  return [[look.axis, ...drawn.map(({ label }) => label)], ...rows];
}

const SAMPLE_PX = 22;
const LINE_PX = 17;

/** The chart with its title and whole legend, on the page's own background. */
async function picture(title: string, drawn: Drawn[], plot: uPlot | null): Promise<void> {
  if (!plot) return;
  const source = plot.ctx.canvas;
  const scale = window.devicePixelRatio || 1;
  const canvas = document.createElement("canvas");
  const pen = canvas.getContext("2d")!;
  const font = "12px system-ui";
  pen.font = font;
  const places = wrapped(drawn.map(({ label }) => SAMPLE_PX + pen.measureText(label).width), source.width / scale - 20, 14);
  const head = 34 + LINE_PX * ((places[places.length - 1]?.line ?? 0) + 1);
  canvas.width = source.width;
  canvas.height = source.height + Math.round(head * scale);
  const colourOf = coloured();
  pen.fillStyle = colourOf("--card");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(source, 0, Math.round(head * scale));
  pen.scale(scale, scale);
  pen.fillStyle = colourOf("--ink");
  pen.font = "600 14px system-ui";
  pen.fillText(title, 10, 22);
  pen.font = font;
  pen.lineWidth = 2;
  drawn.forEach(({ label, colour, line }, at) => {
    const [x, y] = [10 + places[at]!.x, 40 + LINE_PX * places[at]!.line];
    pen.strokeStyle = colourOf(colour);
    pen.setLineDash(dashOf(line));
    pen.beginPath();
    pen.moveTo(x, y - 4);
    pen.lineTo(x + SAMPLE_PX - 5, y - 4);
    pen.stroke();
    pen.fillText(label, x + SAMPLE_PX, y);
  });
  const blob = await new Promise<Blob | null>((done) => canvas.toBlob(done, "image/png"));
  if (blob) save(`${fileName(title)}.png`, blob);
}
