// What the editor suggests, and what it says of a setting.

import { strict as assert } from "node:assert";
import { test } from "node:test";
import type { Schema } from "../src/editor/schema.ts";
import { environmentIn, environmentNames, meaningAt, suggestions, withConfig } from "../src/editor/suggest.ts";

const SCHEMA: Schema = {
  $defs: {
    EnvironmentSpec: { properties: { name: { type: "string" }, config: { type: "object" } } },
    SweepParameter: { properties: { low: { type: "number", description: "Lower end." }, log: { type: "boolean" } } },
    Sweep: { properties: { method: { enum: ["grid", "random"] }, parameters: { type: "object" } } },
  },
  properties: {
    name: { type: "string" },
    kind: { enum: ["rl"] },
    environment: { $ref: "#/$defs/EnvironmentSpec" },
    train: { type: "object", properties: { lr: { type: "number", description: "Learning rate." }, schedule: { enum: ["constant", "cosine"] } } },
    sweep: { $ref: "#/$defs/Sweep" },
  },
};
const CONFIG: Schema = { $defs: { Board: { enum: ["cells", "text"] } }, properties: { digits: { type: "integer", description: "How many." }, board: { $ref: "#/$defs/Board" } } };

function labels(text: string, schema = SCHEMA, known: (path: string) => string[] = () => []): string[] {
  return (suggestions(text, schema, known)?.options ?? []).map((one) => one.label);
}

test("in [sweep.parameters] settings of the spec are suggested, and then how they are varied", () => {
  const table = "[sweep.parameters]\n";
  assert.deepEqual(labels(table), ["environment", "train"]);
  assert.deepEqual(labels(`${table}train.`), ["lr", "schedule"]);
  assert.deepEqual(labels(`${table}train.lr = { l`), ["low", "log"]);
  assert.deepEqual(labels(`${table}train.lr = { log = `), ["true", "false"]);
  assert.deepEqual(labels(`${table}train.schedule = [`), ['"constant"', '"cosine"']);
  assert.deepEqual(labels(`${table}train.schedule = { values = ["constant", `), ['"constant"', '"cosine"']);
  assert.deepEqual(labels('{"sweep": {"parameters": {"train": {"l'), ["lr", "schedule"]);
  assert.deepEqual(labels("[sweep]\nmethod = "), ['"grid"', '"random"']);
  assert.deepEqual(labels("[sweep.parameters]\nenvironment.name = [", SCHEMA, (path) => [`a ${path}`]), ['"a environment.name"']);
  assert.equal(meaningAt(SCHEMA, "sweep.parameters.train.lr"), "Learning rate.");
  assert.equal(meaningAt(SCHEMA, "sweep.parameters.train.lr.low"), "Lower end.");
});

test("the settings of the spec's environment are suggested with their values", () => {
  const schema = withConfig(SCHEMA, CONFIG);
  assert.deepEqual(labels("[environment.config]\n", schema), ["digits", "board"]);
  assert.deepEqual(labels("[environment.config]\nboard = ", schema), ['"cells"', '"text"']);
  assert.deepEqual(labels("[sweep.parameters]\nenvironment.config.", schema), ["digits", "board"]);
  assert.equal(meaningAt(schema, "environment.config.digits"), "How many.");
  assert.deepEqual(labels("[environment.config]\n"), []);
});

test("an environment is suggested by the name that a spec has for it", () => {
  const offered = { built_in: ["copy_digits", "gsm8k"], environments: [{ name: "mine" }] };
  assert.deepEqual(environmentNames(offered, ["gsm8k", undefined, "served:x"]), ["copy_digits", "gsm8k", "upload:mine", "served:x"]);
  assert.deepEqual(environmentNames(null, []), []);
});

test("names are suggested without being asked for only while one is written, quoted in JSON", () => {
  assert.equal(suggestions("[train]\n", SCHEMA, () => [], false), null);
  assert.equal(suggestions("[train]\nl", SCHEMA, () => [], false)?.from, 8);
  assert.equal(suggestions('{"train": {"l', SCHEMA, () => [])?.options[0]!.apply, '"lr"');
});

test("the environment is read from a text that is still being written", () => {
  assert.equal(environmentIn('[environment]\nname = "copy_digits"\n[environment.config]\ndig'), "copy_digits");
  assert.equal(environmentIn("environment = { name = 'upload:mine@2' }"), "upload:mine@2");
  assert.equal(environmentIn('{"environment": {"name": "x"'), "x");
  assert.equal(environmentIn("[environment]\nname = "), "");
});
