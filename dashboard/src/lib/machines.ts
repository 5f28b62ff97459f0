// Workers by the machine that they run on: containers of one machine have host names of their own.

import type { Worker } from "./types.ts";
import { counted } from "./words.ts";

export interface Machine {
  /** Its host name; of several containers the first one's and how many more there are. */
  name: string;
  /** Workers on it. */
  count: number;
  cores: number;
  gpus: Map<number, Worker["gpus"][number]>;
}

export function machinesOf(workers: readonly Worker[]): Machine[] {
  const found = new Map<string, { hosts: Set<string> } & Machine>();
  for (const worker of workers) {
    const key = worker.machine || worker.host;
    const one = found.get(key) ?? { name: "", count: 0, cores: 0, gpus: new Map(), hosts: new Set<string>() };
    one.hosts.add(worker.host);
    one.count += 1;
    one.cores = Math.max(one.cores, worker.cores);
    for (const gpu of worker.gpus) one.gpus.set(gpu.index, gpu);
    found.set(key, one);
  }
  return [...found.values()].map(({ hosts, ...one }) => ({ ...one, name: named([...hosts].sort()) }));
}

function named([first, ...others]: string[]): string {
  if (!others.length) return first ?? "";
  return `${first} and ${counted(others.length, "more container")}`;
}
