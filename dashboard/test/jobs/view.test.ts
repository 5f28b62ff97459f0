// The address of the list of jobs.

import { strict as assert } from "node:assert";
import { test } from "node:test";
import { sortDirectionOf, filterOf, FIRST_SORT, queryOf, sortedBy, sortsFor, viewOf, withLabel, without, type Label, type ListView } from "../../src/lib/jobs/view.ts";

const VIEW: ListView = {
  search: "lr & rank ",
  sort: "-name",
  by: "owner",
  labels: [["project", "maths"], ["tag", "small"], ["tag", "seed 2"], ["model", "some/model"], ["state", "running"]],
};

test("an address shows the same list again, and the first list needs none", () => {
  assert.deepEqual(viewOf(queryOf(VIEW)), VIEW);
  assert.equal(queryOf(viewOf("")), "");
  assert.deepEqual(viewOf("by=nonsense&other=1"), { search: "", sort: FIRST_SORT, by: "", labels: [] });
});

test("the server is asked by all filters, and by nothing else", () => {
  assert.deepEqual([...filterOf(VIEW)], [["project", "maths"], ["model", "some/model"], ["state", "running"], ["tag", "small,seed 2"], ["search", "lr & rank"]]);
  assert.equal(`${filterOf({ labels: [["name", "run 1"]], search: "" })}`, "name_is=run+1", "not run 10 too");
  assert.equal(`${filterOf({ labels: [["notes", "lr 1e-4"]], search: "" })}`, "notes_is=lr+1e-4");
});

test("a job has several tags, but one value of all else", () => {
  let labels: Label[] = [];
  for (const label of [["kind", "rl"], ["tag", "a"], ["tag", "b"], ["tag", "a"], ["kind", "sft"]] as Label[]) labels = withLabel(labels, label);
  assert.deepEqual(labels, [["tag", "b"], ["tag", "a"], ["kind", "sft"]]);
  assert.deepEqual(without(labels, ["tag", "b"]), [["tag", "a"], ["kind", "sft"]]);
  assert.deepEqual(withLabel(labels, ["kind", ""]), [["tag", "b"], ["tag", "a"]]);
  assert.deepEqual(withLabel(labels, ["tag", ""]), [["kind", "sft"]]);
});

test("a column sorts by itself, then the other way around, and says which", () => {
  assert.equal(sortedBy("state", "Time"), "created");
  assert.equal(sortedBy("created", "Time"), "-created");
  assert.equal(sortedBy("-created", "Time"), "created");
  assert.equal(sortedBy("state", "Curve"), "state");
  assert.deepEqual(["Kind", "Notes", "Updated", "Finished"].map((name) => sortedBy("state", name)), ["kind", "notes", "updated", "finished"]);
  assert.deepEqual(["created", "-created"].map((sort) => sortDirectionOf(sort, "Time")), ["descending", "ascending"]);
  assert.deepEqual(["name", "-name", "created"].map((sort) => sortDirectionOf(sort, "Job")), ["ascending", "descending", undefined]);
  assert.deepEqual(sortsFor("-name").at(-1), ["-name", "by name, reversed"]);
});
