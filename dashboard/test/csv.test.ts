import assert from "node:assert/strict";
import { test } from "node:test";
import { csv } from "../src/lib/csv.ts";

test("a table is written so that no cell becomes a formula or two", () => {
  assert.equal(csv([["a,b", 'say "x"'], ["=1+1", "-5"]]), `"a,b","say ""x"""\n'=1+1,-5\n`);
  assert.equal(csv([['=HYPERLINK("http://x","y")', "\t=1", "-1e-4"]]), `"'=HYPERLINK(""http://x"",""y"")",'\t=1,-1e-4\n`);
  assert.equal(csv([["a\rb"]]), '"a\rb"\n');
});
