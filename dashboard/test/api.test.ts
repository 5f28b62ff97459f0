import assert from "node:assert/strict";
import { test } from "node:test";
import { onceKey } from "../src/lib/api.ts";

test("a key for one request needs no secure context, and there are no two alike", (t) => {
  t.mock.method(crypto, "randomUUID", () => assert.fail("plain HTTP has none"));
  const keys = new Set(Array.from({ length: 100 }, onceKey));
  assert.equal(keys.size, 100);
  for (const key of keys) assert.match(key, /^[0-9a-f]{32}$/);
});
