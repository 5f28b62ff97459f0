// Jobs that the list has loaded: the next page behind them, and all of them anew, so that none is lost between two pages.

import { ask, type Asking } from "../api.ts";
import type { Job } from "../types.ts";

export const PAGE = 200;
/** The most that one answer of the API has. */
export const MOST = 1000;

export interface Listed {
  jobs: Job[];
  cursor: string;
  more: boolean;
}

type Ask = (path: string, asking: Asking) => Promise<Listed>;

/** The list with the next page, of so many jobs. */
export async function extended(listed: Listed | null, filter: string, asking: Asking = {}, get: Ask = ask, count = PAGE): Promise<Listed> {
  const page = await get(pathOf(count, filter, listed?.cursor ?? ""), asking);
  return { ...page, jobs: once([...(listed?.jobs ?? []), ...page.jobs]) };
}

/** The list as it is now: as long as it was, and longer by the jobs that have come in between the others since. */
export async function anew(listed: Listed, filter: string, asking: Asking = {}, get: Ask = ask): Promise<Listed> {
  const known = new Set(listed.jobs.map((job) => job.id));
  let next: Listed = { jobs: [], cursor: "", more: true };
  let count = Math.max(PAGE, listed.jobs.length);
  while (next.more && next.jobs.length < count) {
    const page = await get(pathOf(Math.min(MOST, count - next.jobs.length), filter, next.cursor), asking);
    next = { ...page, jobs: once([...next.jobs, ...page.jobs]) };
    const between = next.jobs.slice(0, next.jobs.findLastIndex((job) => known.has(job.id)) + 1).filter((job) => !known.has(job.id));
    count = Math.max(PAGE, listed.jobs.length + between.length);
  }
  return next;
}

function pathOf(limit: number, filter: string, before: string): string {
  return `/v1/jobs?limit=${limit}${before && `&before=${before}`}${filter}`;
}

/** Each job once, where it was first: one may have moved while pages were read. */
function once(jobs: Job[]): Job[] {
  return [...new Map(jobs.toReversed().map((job) => [job.id, job])).values()].toReversed();
}
