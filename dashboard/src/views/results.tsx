// The result of an eval job: every metric with its interval.

import type { JSX } from "preact";
import { resultRows } from "../lib/results.ts";
import type { EvalResult } from "../lib/types.ts";
import { short } from "../lib/words.ts";
import { Head } from "../parts.tsx";

export function Results({ result }: { result: EvalResult }): JSX.Element {
  const rows = resultRows(result.values);
  const intervals = rows.some((row) => row.interval);
  return (
    <section class="card results" aria-label="Result">
      <h2>
        Result <small class="dim">weights {result.version}</small>
      </h2>
      <table>
        <Head of={["Metric", "Value", ...(intervals ? ["95 % interval"] : [])]} />
        <tbody>
          {rows.map((row) => (
            <tr key={row.name}>
              <td data-label="Metric">{row.name}</td>
              <td data-label="Value">
                <b>{short(row.value)}</b>
              </td>
              {intervals && <td data-label="95 % interval">{row.interval ? `${short(row.interval[0])} to ${short(row.interval[1])}` : ""}</td>}
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
