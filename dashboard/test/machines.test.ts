import assert from "node:assert/strict";
import { test } from "node:test";
import { machinesOf } from "../src/lib/machines.ts";
import type { Worker } from "../src/lib/types.ts";

const worker = (host: string, machine: string): Worker => ({
  id: host,
  incarnation: "",
  pool: "env",
  host,
  pid: 1,
  job: null,
  status: "idle",
  detail: {},
  gpus: [],
  cores: 2,
  machine,
  lease: null,
});

test("containers of one machine are one machine, with its cores counted once", () => {
  const found = machinesOf([worker("a1", "m"), worker("b2", "m"), worker("c3", "n"), worker("d4", "")]);
  assert.deepEqual(
    found.map(({ name, count, cores }) => [name, count, cores]),
    [
      ["a1 and 1 more container", 2, 2],
      ["c3", 1, 2],
      ["d4", 1, 2],
    ],
  );
});
