// Curves of a job with several policies: side by side, of one alone, and beside what belongs to none.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Joined } from "../../src/lib/live/join.ts";
import { PANELS, single } from "../../src/lib/curves/panels.ts";
import { payoffs } from "../../src/lib/curves/payoffs.ts";
import { advances, linesOf, namesOf, reported } from "../../src/lib/curves/policies.ts";
import { inferenceSpec } from "../../src/lib/serve.ts";
import type { JobDetail } from "../../src/lib/types.ts";

const panel = (title: string) => PANELS.find((one) => one.title === title)!;

function game(): Joined {
  const joined = new Joined();
  const add = (source: string, seq: number, time: number, step: number, values: Record<string, number>): void =>
    void joined.add({ source, incarnation: "a", seq, time, step, values });
  for (const step of [1, 2]) {
    const own = (name: string, mean: number) => ({
      [`${name}/reward/mean`]: mean,
      [`${name}/loss/policy`]: mean,
      [`${name}/loss/kl`]: 0,
      [`${name}/step_seconds`]: 1,
      [`${name}/trainer/tokens_per_s`]: 7,
    });
    add("trainer~speaker", step, 100 + step, step, own("speaker", step / 10));
    add("trainer~listener", step, 100 + step, step, own("listener", step / 5));
    add("rollout-0", step, 100.5 + step, 0, { "rollout/tokens_per_s": 40 });
  }
  return joined;
}

test("a chart has a line for each policy, in a colour of its own that is the same in every chart", () => {
  const lines = linesOf(panel("Reward"), game(), "step").filter((line) => line.x.length);
  assert.deepEqual(lines.map(({ label, y }) => [label, y]), [["listener", [0.2, 0.4]], ["speaker", [0.1, 0.2]]]);
  assert.equal(new Set(lines.map((line) => line.colour)).size, 2);
  const loss = linesOf(panel("Loss"), game(), "step").filter((line) => line.x.length);
  assert.deepEqual(loss.map((line) => line.label), ["listener policy", "listener KL term", "speaker policy", "speaker KL term"]);
  assert.deepEqual(loss.map((line) => line.colour), [lines[0]!.colour, lines[0]!.colour, lines[1]!.colour, lines[1]!.colour]);
  assert.deepEqual(loss.map((line) => line.pattern), [0, 1, 0, 1], "what one policy says twice differs by its dashes");
});

test("one policy is drawn as a job that has no other", () => {
  const lines = linesOf(panel("Reward"), game(), "step", "speaker").filter((line) => line.x.length);
  assert.deepEqual(lines.map(({ label, y }) => [label, y]), [["reward", [0.1, 0.2]]]);
  assert.ok(lines[0]!.low, "with its band");
});

test("what workers say is of all policies, drawn once, at the step that the first one had reached", () => {
  const lines = linesOf(panel("Tokens per second"), game(), "step").filter((line) => line.x.length);
  assert.deepEqual(lines.map(({ label, x }) => [label, x]), [["listener trained", [1, 2]], ["speaker trained", [1, 2]], ["generated", [1, 2]]]);
  assert.deepEqual(linesOf(single("reward/mean"), game(), "step").filter((line) => line.x.length).map((line) => line.label), ["listener", "speaker"]);
  assert.deepEqual(namesOf(game()).filter((name) => name.includes("reward")), ["reward/mean"]);
});

test("how far opponents have moved is drawn from nothing to the largest of the batch", () => {
  const joined = game();
  const values = { "speaker/opponent_lag/mean": 1.5, "speaker/opponent_lag/max": 4 };
  joined.add({ source: "trainer~speaker", incarnation: "a", seq: 3, time: 103, step: 3, values });
  const [line] = linesOf(panel("Opponent lag"), joined, "step", "speaker").filter((one) => one.x.length);
  assert.deepEqual([line?.y.at(-1), line?.low?.at(-1), line?.high?.at(-1)], [1.5, 0, 4]);
});

test("points that come later are in the curves too", () => {
  const joined = game();
  linesOf(panel("Reward"), joined, "step");
  joined.add({ source: "trainer~speaker", incarnation: "a", seq: 3, time: 103, step: 3, values: { "speaker/reward/mean": 1 } });
  const speaker = linesOf(panel("Reward"), joined, "step").find((line) => line.label === "speaker");
  assert.deepEqual(speaker?.y, [0.1, 0.2, 1]);
});

test("each policy has its own progress, its last report and its own model to talk to", () => {
  const job = {
    id: "j-1",
    name: "game",
    steps: 24,
    spec: {
      model: { base: "small" },
      train: { steps: 24 },
      policies: { speaker: { model: { base: "large" }, train: { steps: 24 } }, listener: { model: { base: "small" }, train: { steps: 48 } } },
    },
    policies: { speaker: {}, listener: {} },
    metrics: { "trainer~listener": { step: 9, time: 1, values: {} } },
    progress: { policies: { speaker: { "reward/mean": 0.5, exact: 1 }, listener: { "reward/mean": 0.25, step_seconds: 2 } } },
  } as unknown as JobDetail;
  assert.deepEqual(advances(job, game()), [
    { policy: "speaker", step: 2, steps: 24 },
    { policy: "listener", step: 9, steps: 48 },
  ]);
  assert.deepEqual(reported(job), [["speaker reward/mean", 0.5], ["listener reward/mean", 0.25]]);
  const spec = inferenceSpec(job, 7, "speaker") as { model: { base: string }; start: { from: string } };
  assert.deepEqual([spec.model.base, spec.start.from], ["large", "j-1~speaker@7"]);
});

test("win rates are a matrix of the latest evaluations, and ratings a curve with its error", () => {
  const joined = game();
  assert.equal(payoffs(joined), null);
  const won = (name: string, seq: number, step: number, rates: Record<string, number>): void => {
    const values = Object.entries(rates).map(([opponent, rate]) => [`${name}/val/winrate/${opponent}`, rate]);
    const all = { ...Object.fromEntries(values), [`${name}/val/winrate/random/low`]: 0.1, [`${name}/val/winrate/low`]: 0.2 };
    joined.add({ source: `trainer~${name}`, incarnation: "a", seq, time: 200 + seq, step, values: { ...all, [`${name}/val/rating`]: 40, [`${name}/val/rating/error`]: 5 } });
  };
  won("speaker", 3, 20, { random: 0.5, listener: 0.4 });
  won("speaker", 4, 40, { random: 0.75 });
  won("listener", 3, 20, { random: 0.25, speaker: 0.6 });
  const found = payoffs(joined)!;
  assert.deepEqual([found.players, found.opponents], [["listener", "speaker"], ["listener", "speaker", "random"]]);
  assert.deepEqual(found.of("speaker", "random"), { rate: 0.75, low: 0.1, high: undefined, step: 40 });
  assert.equal(found.of("speaker", "listener")?.rate, 0.4);
  assert.equal(found.of("speaker", "speaker"), undefined);
  const drawn = (title: string, policy = "") => linesOf(panel(title), joined, "step", policy).filter((line) => line.x.length);
  assert.deepEqual(drawn("Win rate", "speaker").map((line) => [line.label, line.y]), [["against listener", [0.4]], ["against random", [0.5, 0.75]]]);
  assert.deepEqual(drawn("Rating", "speaker").map((line) => [line.y, line.low]), [[[40, 40], [35, 35]]]);
  assert.deepEqual(drawn("Rating").map((line) => line.label), ["listener", "speaker"]);
});
