import assert from "node:assert/strict";
import { test } from "node:test";
import { ago, bytes } from "../src/lib/words.ts";

test("times and sizes are rough, with the units of the command line", () => {
  assert.equal(ago(100, 147), "47 s ago");
  assert.equal(ago(100, 100 + 18 * 60 + 7), "18 min ago");
  assert.equal(ago(100, 100 + 5 * 3600), "5 h ago");
  assert.equal(ago(100, 100 + 72 * 3600), "3 d ago");
  assert.equal(ago(100, 99), "0 s ago");
  assert.equal(bytes(999), "999 B");
  assert.equal(bytes(28_618_007), "28.6 MB");
  assert.equal(bytes(5e9), "5.0 GB");
});
