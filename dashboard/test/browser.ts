// As much of a browser as the parts below the views ask for: a clock that tests turn, and a server that they play.

import type { TestContext } from "node:test";

export const NOW = 1_000_000;

/** `answer` says what a path gives; what it throws is a server that is away. */
export function browser(t: TestContext, answer: (path: string) => unknown): { pass: (seconds: number) => Promise<void> } {
  t.mock.timers.enable({ apis: ["setTimeout", "Date"], now: NOW * 1000 });
  const kept = { getItem: () => null };
  for (const [name, value] of Object.entries({ window: globalThis, sessionStorage: kept }))
    Object.defineProperty(globalThis, name, { value, configurable: true });
  t.mock.method(globalThis, "fetch", async (path: string) => new Response(JSON.stringify(answer(path))));
  return {
    pass: async (seconds) => {
      await settled();
      for (let i = 0; i < seconds * 4; i += 1) {
        t.mock.timers.tick(250);
        await settled();
      }
    },
  };
}

/** Whatever waits for nothing but promises has gone on. */
export async function settled(): Promise<void> {
  for (let i = 0; i < 3; i += 1) await new Promise((done) => setImmediate(done));
}
