// The members of a job's opponent pools: how its policies do against their past versions.

import type { JSX } from "preact";
import type { JobDetail, OpponentPool, PoolMember } from "../../lib/types.ts";

export function PoolMembers({ job }: { job: JobDetail }): JSX.Element {
  return (
    <>
      {Object.entries(job.pools ?? {}).map(([name, pool]) => (
        <Pool key={name} name={name} pool={pool} />
      ))}
    </>
  );
}

function Pool({ name, pool }: { name: string; pool: OpponentPool }): JSX.Element {
  const whose = pool.policy || "the policy";
  return (
    <section class="card payoffs" aria-label={`Pool ${name}`}>
      <h2>Pool {name}</h2>
      <small class="dim">
        Past versions of {whose} that it plays against, newest first. Win rates of {whose} are of recent games; a draw counts half. Ratings are Elo points on the
        scale of all players of the job.
      </small>
      <div class="scrolls">
        <table>
          <thead>
            <tr>
              {["version", "games", "won", "drawn", "lost", "win rate", "rating"].map((column) => (
                <th key={column} scope="col">
                  {column}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>{[...pool.members].reverse().map((member) => <Member key={member.version} of={member} />)}</tbody>
        </table>
      </div>
    </section>
  );
}

function Member({ of }: { of: PoolMember }): JSX.Element {
  const { won, drawn, lost } = of;
  return (
    <tr>
      <th scope="row">{of.version}</th>
      {[won + drawn + lost, won, drawn, lost].map((games, place) => (
        <td key={place}>{games.toLocaleString("en")}</td>
      ))}
      <td>{of.win_rate === null ? "–" : `${(of.win_rate * 100).toFixed(0)}%`}</td>
      <td>{of.rating === null ? "–" : `${Math.round(of.rating) || 0} ± ${(of.rating_error ?? 0).toFixed(0)}`}</td>
    </tr>
  );
}
