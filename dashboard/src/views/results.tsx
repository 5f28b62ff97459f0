// The result of an eval job: categories, and every metric, with their intervals.

import type { JSX } from "preact";
import { resultRows } from "../lib/results.ts";
import type { Category, EvalResult, Estimate } from "../lib/types.ts";
import { short } from "../lib/words.ts";
import { Head } from "../parts.tsx";

export function Results({ result }: { result: EvalResult }): JSX.Element {
  const rows = resultRows(result.values, result.categories.map((one) => one.name));
  const intervals = rows.some((row) => row.interval);
  return (
    <section class="card results" aria-label="Result">
      <h2>
        Result <small class="dim">weights {result.version}</small>
      </h2>
      {result.categories.length > 0 && <Categories of={result.categories} />}
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

function Categories({ of }: { of: Category[] }): JSX.Element {
  return (
    <table aria-label="By category">
      <Head of={["Category", "Episodes", "Reward", "Solved"]} />
      <tbody>
        {of.map((one) => (
          <tr key={one.name}>
            <td data-label="Category">{one.name}</td>
            <td data-label="Episodes">{one.episodes}</td>
            <td data-label="Reward">
              <Bounded of={one.reward} />
            </td>
            <td data-label="Solved">
              <Bounded of={one.solved} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Bounded({ of: { value, low, high } }: { of: Estimate }): JSX.Element {
  return (
    <>
      <b>{short(value)}</b> {low !== null && high !== null && <small class="dim">{`${short(low)} to ${short(high)}`}</small>}
    </>
  );
}
