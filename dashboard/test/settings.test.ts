import { strict as assert } from "node:assert";
import { test } from "node:test";
import { configOf, settingsOf } from "../src/lib/settings.ts";

const about = {
  name: "e",
  doc: "",
  bots: [],
  seats: [],
  can_fork: false, example: "",
  settings: {
    properties: {
      digits: { type: "integer", default: 3, description: "How many." },
      split: { enum: ["train", "test"], default: "train" },
      path: { anyOf: [{ type: "string" }, { type: "null" }] },
      kind: { $ref: "#/$defs/Kind" },
    },
    required: ["path"],
  },
};

test("settings have a type, a default and a meaning", () => {
  assert.deepEqual(settingsOf(about), [
    { name: "digits", kind: "integer", standard: "3", meaning: "How many." },
    { name: "split", kind: '"train" | "test"', standard: '"train"', meaning: "" },
    { name: "path", kind: "string | null", standard: "", meaning: "" },
    { name: "kind", kind: "Kind", standard: "", meaning: "" },
  ]);
  assert.deepEqual(settingsOf({ ...about, settings: {} }), []);
});

test("a config is an object in JSON", () => {
  assert.deepEqual(configOf(" "), {});
  assert.deepEqual(configOf('{"digits": 3}'), { digits: 3 });
  for (const wrong of ["[1]", "3", "null", "{digits: 3}"]) assert.throws(() => configOf(wrong), SyntaxError);
});
