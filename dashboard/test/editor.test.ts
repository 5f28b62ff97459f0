// The editor's text: where settings are, what is completed at a position, how a form writes into it.

import { strict as assert } from "node:assert";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";
import { parse } from "smol-toml";
import { changeOf, removalOf } from "../src/editor/change.ts";
import { floatsIn, withFloats } from "../src/editor/floats.ts";
import { placeOf, placesIn, spotAt } from "../src/editor/places.ts";
import { hintOf, settingsOf, valuesOf, type Schema } from "../src/editor/schema.ts";
import { kindOf, posted, readSpec, Unreadable, writeSpec } from "../src/editor/text.ts";
import type { Json } from "../src/lib/types.ts";

const TEXT = `# a job
name = "x" # its name
model = { base = "runs/tiny", lora = { rank = 8 } }
tags = [
  "a",  # first
  'b',
]
[train]
steps = 200
lr = 3e-4
[sweep.parameters]
train.lr = [1e-5, 1e-4]
"rollout.max_tokens" = [4]
[[notify]]
url = """one
two = 3"""
[[notify]]
email = "a@b.c"
`;

function shown(text: string): Record<string, string> {
  return Object.fromEntries(placesIn(text).map((one) => [one.path, text.slice(one.valueFrom, one.valueTo)]));
}

test("settings are found wherever TOML allows them", () => {
  assert.deepEqual(shown(TEXT), {
    name: '"x"', model: '{ base = "runs/tiny", lora = { rank = 8 } }', "model.base": '"runs/tiny"',
    "model.lora": "{ rank = 8 }", "model.lora.rank": "8", tags: '[\n  "a",  # first\n  \'b\',\n]', "tags.0": '"a"',
    "tags.1": "'b'", train: "[train]", "train.steps": "200", "train.lr": "3e-4", "sweep.parameters": "[sweep.parameters]",
    "sweep.parameters.train.lr": "[1e-5, 1e-4]", "sweep.parameters.train.lr.0": "1e-5",
    "sweep.parameters.train.lr.1": "1e-4", "sweep.parameters.rollout.max_tokens": "[4]",
    "sweep.parameters.rollout.max_tokens.0": "4", "notify.0": "[[notify]]", "notify.0.url": '"""one\ntwo = 3"""',
    "notify.1": "[[notify]]", "notify.1.email": '"a@b.c"',
  }); // prettier-ignore
});

test("settings of JSON are found the same way", () => {
  const text = JSON.stringify({ name: "x", train: { lr: 1e-4, schedule: null }, tags: ["a", { b: [] }] }, null, 2);
  assert.deepEqual(
    { ...shown(text), train: "", tags: "", "tags.1": "" },
    { name: '"x"', train: "", "train.lr": "0.0001", "train.schedule": "null", tags: "", "tags.0": '"a"', "tags.1": "", "tags.1.b": "[]" },
  );
});

test("a mistake is shown at its setting, or at the nearest table above it", () => {
  const places = placesIn(TEXT);
  const at = (field: string): string | undefined => {
    const place = placeOf(places, field);
    return place ? TEXT.slice(place.from, place.to) : undefined;
  };
  assert.equal(at("train.lr"), "lr");
  assert.equal(at("sweep.parameters.train.lr"), "train.lr");
  assert.equal(at("train.warmup_steps"), "[train]");
  assert.equal(at("model.lora.alpha.x"), "lora");
  assert.equal(at("rollout.engine"), undefined);
});

const SPOTS: [string, string][] = [
  ["", "name of "],
  ["na", "name of "],
  ["[tra", "name of "],
  ["[train]\nst", "name of train"],
  ["[train]\nsteps = 1\n", "name of train"],
  ["[train]\nsteps = 1 ", "nothing"],
  ["train.l", "name of train"],
  ["model = { ba", "name of model"],
  ['model = { base = "x", lora = { r', "name of model.lora"],
  ["[algorithm]\nname = ", "value of algorithm.name"],
  ['[algorithm]\nname = "gr', "value of algorithm.name"],
  ["[policies.a.train]\nlr = 1", "value of policies.a.train.lr"],
  ["[[tools]]\nk", "name of tools.0"],
  ["tags = [1, ", "value of tags.1"],
  ['{"train": {"st', "name of train"],
  ['{"train": {"steps": ', "value of train.steps"],
  ["# a comm", "nothing"],
];

for (const [text, wanted] of SPOTS) {
  test(`what is written at the end of ${JSON.stringify(text)}: ${wanted}`, () => {
    const spot = spotAt(text);
    assert.equal(spot ? `${spot.role} of ${spot.path}` : "nothing", wanted);
  });
}

test("no text holds the reader up, however broken it is", () => {
  const pieces = ["[", "]", "{", "}", '"', "'", '"""', "=", ".", ",", "\n", "#", "a", ":", "\\", " "];
  let seed = 7;
  for (let count = 0; count < 3000; count++) {
    let text = "";
    for (let length = 0; length < 24; length++) {
      seed = (seed * 1103515245 + 12345) % 2 ** 31;
      text += pieces[seed % pieces.length];
    }
    for (const place of placesIn(text)) assert.ok(place.from <= place.to && place.valueTo <= text.length);
    spotAt(text);
  }
});

function changed(text: string, path: string, value: Json): string {
  const change = changeOf(text, path, value);
  return text.slice(0, change.from) + change.insert + text.slice(change.to);
}

test("a form writes a setting wherever it belongs and leaves the rest as it is", () => {
  const cases: [string, Json][] = [
    ["name", "y"], ["project", "p"], ["model.base", "other"], ["model.dtype", "float32"], ["model.lora.alpha", 4],
    ["train.steps", 5], ["train.warmup_steps", 1], ["rollout.max_tokens", 9],
  ]; // prettier-ignore
  for (const [path, value] of cases) {
    const written = changed(TEXT, path, value);
    const [before, after] = [parse(TEXT), parse(written)];
    assert.equal(at(after, path), value, written);
    assert.ok(written.includes("# its name") && written.includes("# first"));
    const back = at(before, path);
    if (back !== undefined) assert.deepEqual(parse(changed(written, path, back as Json)), before);
  }
  assert.equal(changed("", "train.lr", 1e-4), "[train]\nlr = 0.0001\n");
  assert.equal(changed("model = {}\n", "model.base", "x"), 'model = { base = "x" }\n');
  assert.deepEqual(JSON.parse(changed('{"name": "x"}', "train.lr", 1)), { name: "x", train: { lr: 1 } });
});

/** The value at a path. */
function at(spec: unknown, path: string): unknown {
  return path.split(".").reduce((table, name) => (table as Record<string, unknown> | undefined)?.[name], spec);
}

test("a form never writes a table a second time, whichever way the text defines it", () => {
  const cases: [text: string, path: string, wanted: string][] = [
    ["train.lr = 1e-4 # low\n[model]\n", "train.steps", "train.lr = 1e-4 # low\ntrain.steps = 7\n[model]\n"],
    ["[model]\nlora.alpha = 4", "model.lora.rank", "[model]\nlora.alpha = 4\nlora.rank = 7"],
    ['model = { base = "x" }\n', "model.lora.rank", 'model = { base = "x", lora.rank = 7 }\n'],
    ['model = { base = "x", lora.alpha = 4 }\n', "model.lora.rank", 'model = { base = "x", lora.alpha = 4, lora.rank = 7 }\n'],
    ['model.base = "x"\n[model.lora]\nalpha = 4\n', "model.dtype", 'model.base = "x"\nmodel.dtype = 7\n[model.lora]\nalpha = 4\n'],
    ['model.base = "x"\n', "model.lora.rank", 'model.base = "x"\nmodel.lora.rank = 7\n'],
    ["[model.lora]\nalpha = 4\n", "model.base", "[model.lora]\nalpha = 4\n\n[model]\nbase = 7\n"],
  ];
  for (const [text, path, wanted] of cases) {
    const written = changed(text, path, 7);
    assert.equal(written, wanted);
    assert.equal(at(parse(written), path), 7);
  }
});

test("a cleared field takes its setting out of the text, and nothing else", () => {
  const without = (text: string, path: string): string => {
    const change = removalOf(text, path)!;
    return text.slice(0, change.from) + change.insert + text.slice(change.to);
  };
  const kept = without(TEXT, "train.lr");
  assert.equal(kept, TEXT.replace("lr = 3e-4\n", ""));
  assert.equal(without(TEXT, "name"), TEXT.replace('name = "x" # its name\n', ""));
  assert.equal(without(TEXT, "tags"), TEXT.replace(/tags = [^]*?\]\n/, ""));
  assert.equal(without(TEXT, "model.base"), TEXT.replace('base = "runs/tiny", ', ""));
  assert.equal(without(TEXT, "model.lora"), TEXT.replace(", lora = { rank = 8 }", ""));
  assert.equal(without("[train]\nsteps = 2", "train.steps"), "[train]\n");
  assert.deepEqual(JSON.parse(without('{"name": "x", "train": {"lr": 1, "steps": 2}}', "train.lr")), { name: "x", train: { steps: 2 } });
  assert.equal(removalOf(TEXT, "train.warmup_steps"), null);
  assert.equal(removalOf(TEXT, "train"), null, "a table of its own is no field");
});

test("floats stay floats: the server gets the text, and what is written anew has them", () => {
  const text = '[sweep.parameters]\n"environment.config.t" = { low = 0.0, high = 1e0 }\n"train.steps" = [1, 2]\n';
  assert.deepEqual(posted(text), { method: "POST", text, headers: { "Content-Type": "application/toml" } });
  assert.equal(posted('{"t": 1.0}').text, '{"t": 1.0}');
  const long = `${text}# ${"x".repeat(1 << 16)}`;
  assert.equal(posted(long).text, '{"sweep":{"parameters":{"environment.config.t":{"low":0.0,"high":1.0},"train.steps":[1,2]}}}');
  assert.equal(posted(long).headers["Content-Type"], "application/json");
  const spec = { name: "x", environment: { name: "e", config: { t: 1, ends: [0, 1], count: 1, half: 0.5 } }, model: null };
  const floats = floatsIn('{"environment": {"config": {"t": 1.0, "ends": [0.0, 1], "half": 0.5}}}');
  assert.deepEqual([...floats], ["environment.config.t", "environment.config.ends.0"]);
  const { model: _none, ...own } = spec;
  const schema: Schema = { properties: { name: {}, model: {}, environment: { properties: { name: {}, config: {} } } } };
  assert.match(writeSpec(own, schema, floats), /t = 1\.0\nends = \[ ?0\.0, 1 ?\]\ncount = 1\n/);
  assert.equal(JSON.stringify(JSON.parse(writeSpec(spec, schema, floats))), JSON.stringify(spec));
  assert.match(writeSpec(spec, schema, floats), /"t": 1\.0,/);
  assert.match(changed('{"t": 1.0, "n": 1}', "name", "x"), /"t": 1\.0,\n  "n": 1,/);
  assert.equal(withFloats("a = 1\nb = 1.5\n", new Set(["a", "b"])), "a = 1.0\nb = 1.5\n");
});

test("a number without an end is said at its place", () => {
  const text = "[train]\nlr = inf\n";
  assert.throws(() => readSpec(text), (error) => error instanceof Unreadable && error.at === text.indexOf("inf") && error.message.startsWith("train.lr: "));
  assert.deepEqual(readSpec('name = "inf"\n'), { name: "inf" });
});

test("every example is read as the TOML library reads it", () => {
  const folder = new URL("../../examples/", import.meta.url);
  const leaves = (value: unknown, path: string): string[] =>
    typeof value === "object" && value !== null && !(value instanceof Date)
      ? [...(path ? [path] : []), ...Object.entries(value).flatMap(([name, part]) => leaves(part, path ? `${path}.${name}` : name))]
      : [path];
  for (const file of readdirSync(folder).filter((name) => name.endsWith(".toml"))) {
    const text = readFileSync(new URL(file, folder), "utf8");
    const found = new Set(placesIn(text).map((one) => one.path));
    const missing = leaves(parse(text), "").filter((path) => !found.has(path) && ![...found].some((one) => one.startsWith(`${path}.`)));
    assert.deepEqual(missing, [], file);
  }
});

const SCHEMA: Schema = {
  $defs: {
    Train: {
      type: "object",
      properties: {
        lr: { description: "Learning `rate`.", exclusiveMinimum: 0, maximum: 1, default: 1e-5, type: "number" },
        schedule: { anyOf: [{ enum: ["constant", "cosine"] }, { type: "null" }], default: null },
        on: { type: "boolean" },
      },
    },
    Policy: { properties: { train: { anyOf: [{ $ref: "#/$defs/Train" }, { type: "null" }], description: "Own." } } },
  },
  properties: {
    train: { $ref: "#/$defs/Train", description: "How it learns." },
    policies: { type: "object", patternProperties: { "^[a-z]+$": { $ref: "#/$defs/Policy" } } },
    seats: { type: "object", additionalProperties: { $ref: "#/$defs/Policy" } },
    tools: { type: "array", items: { properties: { name: { const: "time" } } } },
  },
};

test("the schema says what a table may hold, what a setting may be, and what it means", () => {
  assert.deepEqual(settingsOf(SCHEMA, "").map((one) => [one.name, one.isTable]), [["train", true], ["policies", true], ["seats", true], ["tools", false]]);
  assert.deepEqual(settingsOf(SCHEMA, "policies.red.train").map((one) => one.name), ["lr", "schedule", "on"]);
  assert.deepEqual(settingsOf(SCHEMA, "seats.white").map((one) => one.name), ["train"]);
  assert.deepEqual(settingsOf(SCHEMA, "nothing.there"), []);
  assert.deepEqual(valuesOf(SCHEMA, "policies.red.train.schedule"), ["constant", "cosine"]);
  assert.deepEqual(valuesOf(SCHEMA, "train.on"), [true, false]);
  assert.deepEqual(valuesOf(SCHEMA, "tools.3.name"), ["time"]);
  assert.equal(hintOf(SCHEMA, "train.lr"), "Learning rate.\nmore than 0; at most 1; default 0.00001");
  assert.equal(hintOf(SCHEMA, "train"), "How it learns.");
  assert.equal(hintOf(SCHEMA, "train.nothing"), "");
});

test("the form of a sweep is that of the kind of its jobs", () => {
  const kinds = ['', 'kind = "sft"', 'kind = "sweep"', 'kind = "sweep"\n[sweep]\nkind = "dpo"', 'kind = "eval"\n[sweep]\nmax_jobs = 2'];
  assert.deepEqual(kinds.map((text) => kindOf(readSpec(text))), ["rl", "sft", "rl", "dpo", "eval"]);
});
