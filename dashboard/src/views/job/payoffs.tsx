// The pay-off matrix of a job: how often each of its policies wins against each opponent.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Follow } from "../../lib/live/follow.ts";
import { payoffs, type Payoff } from "../../lib/curves/payoffs.ts";

export function PayoffMatrix({ follow }: { follow: Follow }): JSX.Element | null {
  const found = useMemo(() => payoffs(follow.joined), [follow, follow.joined.version]);
  if (!found) return null;
  return (
    <section class="card payoffs" aria-label="Win rates">
      <h2>Win rates</h2>
      <small class="dim">Each policy against each opponent in its latest evaluation. A draw counts as half a win. Below each rate: its 95% interval.</small>
      <div class="scrolls">
        <table>
          <thead>
            <tr>
              <th scope="col">policy</th>
              {found.opponents.map((opponent) => (
                <th key={opponent} scope="col">
                  against {opponent}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {found.players.map((player) => (
              <tr key={player}>
                <th scope="row">{player || "this job"}</th>
                {found.opponents.map((opponent) => (
                  <Cell key={opponent} of={found.of(player, opponent)} />
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Cell({ of }: { of: Payoff | undefined }): JSX.Element {
  if (!of) return <td class="dim">–</td>;
  const lead = Math.min(1, Math.abs(of.rate - 0.5) * 2);
  const colour = `color-mix(in srgb, var(${of.rate < 0.5 ? "--c2" : "--c1"}) ${(lead * 45).toFixed(0)}%, transparent)`;
  return (
    <td style={{ background: colour }} title={`weights of step ${of.step}`}>
      <b>{percent(of.rate)}</b>
      {of.low !== undefined && of.high !== undefined && (
        <small>
          {" "}
          {percent(of.low)} to {percent(of.high)}
        </small>
      )}
    </td>
  );
}

function percent(share: number): string {
  return `${(share * 100).toFixed(0)}%`;
}
