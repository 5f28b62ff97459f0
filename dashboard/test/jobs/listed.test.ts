import assert from "node:assert/strict";
import { test } from "node:test";
import { anew, extended, type Listed } from "../../src/lib/jobs/listed.ts";
import type { Job } from "../../src/lib/types.ts";

const job = (id: string, state = "queued"): Job => ({ id, state }) as unknown as Job;
const ids = (listed: Listed): string[] => listed.jobs.map((one) => one.id);
const many = (count: number, name = "j"): Job[] => Array.from({ length: count }, (_, at) => job(`${name}${at}`));

/** Answers as the server does, of these jobs; the limits that were asked for. */
function server(jobs: () => Job[]): { get: (path: string) => Promise<Listed>; limits: number[] } {
  const limits: number[] = [];
  const get = async (path: string): Promise<Listed> => {
    const query = new URLSearchParams(path.split("?")[1]);
    const [limit, before] = [Number(query.get("limit")), query.get("before") ?? ""];
    assert.equal(query.get("sort"), "state");
    limits.push(limit);
    const from = before ? jobs().findIndex((one) => one.id === before) + 1 : 0;
    const page = jobs().slice(from, from + limit);
    return { jobs: page, cursor: page.at(-1)?.id ?? before, more: jobs().length > from + limit };
  };
  return { get, limits };
}

async function twoPages(get: (path: string) => Promise<Listed>): Promise<Listed> {
  return extended(await extended(null, "&sort=state", {}, get), "&sort=state", {}, get);
}

test("jobs that are submitted push none out of the pages that are loaded", async () => {
  let jobs = many(450);
  const { get } = server(() => jobs);
  const listed = await twoPages(get);
  assert.deepEqual([listed.jobs.length, listed.more], [400, true]);
  jobs = [...many(10, "new"), ...jobs];
  const next = await anew(listed, "&sort=state", {}, get);
  assert.deepEqual(ids(next), jobs.slice(0, 410).map((one) => one.id));
  assert.equal(next.more, true);
});

test("rows of later pages are fresh, and one that moved stands where it belongs", async () => {
  let jobs = many(450);
  const { get } = server(() => jobs);
  const listed = await twoPages(get);
  jobs = [...jobs.filter(({ id }) => id !== "j5").map((one) => (one.id === "j350" ? job("j350", "running") : one)), job("j5", "succeeded")];
  const next = await anew(listed, "&sort=state", {}, get);
  assert.deepEqual([next.jobs.find(({ id }) => id === "j350")?.state, ids(next).includes("j5"), next.jobs.length], ["running", false, 400]);
  const whole = await extended(next, "&sort=state", {}, get);
  assert.deepEqual([whole.jobs.at(-1)?.id, whole.jobs.length, whole.more], ["j5", 450, false]);
});

test("all that is loaded is read in few requests", async () => {
  const jobs = many(2500);
  const { get, limits } = server(() => jobs);
  const next = await anew({ jobs: jobs.slice(0, 2400), cursor: "j2399", more: true }, "&sort=state", {}, get);
  assert.deepEqual([limits, next.jobs.length, next.cursor], [[1000, 1000, 400], 2400, "j2399"]);
});

test("a job that moves between two pages is listed once", async () => {
  let jobs = many(300);
  const { get } = server(() => jobs);
  const listed = await extended(null, "&sort=state", {}, get);
  jobs = [...jobs.slice(1), job("j0", "succeeded")];
  assert.equal(ids(await extended(listed, "&sort=state", {}, get)).filter((id) => id === "j0").length, 1);
});
