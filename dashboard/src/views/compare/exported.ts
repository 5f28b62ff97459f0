// A comparison as a page by itself, which needs no server: the charts as pictures, the drawings, and the table.

import { coloured } from "../../theme.ts";
import { alone } from "./figure.tsx";

/** In the theme of the page that it was made from, as the pictures are. */
export function exported(): string {
  const charts = [...document.querySelectorAll<HTMLElement>("[data-chart]")].map(chartOf);
  const drawings = [...document.querySelectorAll<HTMLElement>("[data-drawing]")].map((one) => figure(alone(one.querySelector("svg")!), escaped(one.dataset["drawing"]!)));
  const table = document.querySelector<HTMLTableElement>("table.compared");
  const parts = [`<p>${new Date().toISOString()}</p>`, ...charts, ...drawings, table ? tableOf(table) : ""];
  return `<!doctype html><meta charset="utf-8"><title>Compared runs</title><style>${style()}</style>${parts.join("\n")}`;
}

function escaped(text: string): string {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
}

function figure(inner: string, caption: string): string {
  return `<figure><figcaption>${caption}</figcaption>${inner}</figure>`;
}

/** With a sample of each line, as its legend has it. */
function chartOf(chart: HTMLElement): string {
  const keys = [...chart.querySelectorAll<HTMLElement>(".legend .key")].map((key) => {
    const sample = getComputedStyle(key.querySelector("i")!).background;
    return `<span class="key"><i style="background: ${escaped(sample)}"></i>${escaped(key.textContent ?? "")}</span>`;
  });
  const picture = chart.querySelector("canvas")?.toDataURL() ?? "";
  return figure(`<img src="${picture}" width="${chart.clientWidth}" alt="">`, `${escaped(chart.dataset["chart"]!)} ${keys.join(" ")}`);
}

/** Without its buttons; links lead to the jobs on this server. */
function tableOf(table: HTMLTableElement): string {
  const copy = table.cloneNode(true) as HTMLTableElement;
  for (const row of copy.rows) if (row.lastElementChild?.querySelector("button")) row.lastElementChild.remove();
  const head = copy.tHead?.rows[0]?.lastElementChild;
  if (head && !head.textContent) head.remove();
  for (const link of copy.querySelectorAll("a")) link.setAttribute("href", link.href);
  return new XMLSerializer().serializeToString(copy);
}

function style(): string {
  const colour = coloured();
  return `
    body { background: ${colour("--card")}; color: ${colour("--ink")}; font: 14px/1.45 system-ui, sans-serif; margin: 16px; }
    figure { margin: 0 0 20px; } figcaption { font-weight: 600; margin-bottom: 4px; }
    .key { display: inline-block; font-weight: 400; font-size: 12px; margin-left: 12px; }
    .key i { display: inline-block; width: 22px; height: 3px; margin-right: 5px; vertical-align: middle; }
    table { border-collapse: collapse; } th, td { border: 1px solid ${colour("--line")}; padding: 3px 8px; text-align: left; }
    a { color: ${colour("--accent")}; }`;
}
