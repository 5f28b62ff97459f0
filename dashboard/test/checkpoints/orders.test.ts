// By which metrics checkpoints can be ordered.

import assert from "node:assert/strict";
import { test } from "node:test";
import { metricOrders } from "../../src/lib/checkpoints/orders.ts";

test("every metric is offered, the usual ones first, the best checkpoint at the top", () => {
  const named = ["exact", "loss", "pass/1", "pass/8", "rating", "reward/mean", "seconds", "winrate"];
  assert.deepEqual(metricOrders(named, "created"), [
    ["exact", "by exact"],
    ["reward/mean", "by mean reward"],
    ["pass/1", "by pass@1"],
    ["-loss", "by loss, lowest first"],
    ["pass/8", "by pass@8"],
    ["rating", "by rating"],
    ["-seconds", "by seconds, lowest first"],
    ["winrate", "by winrate"],
  ]);
  assert.deepEqual(metricOrders([], "created"), []);
});

test("where nobody can tell what is better, both ways are offered, after the others", () => {
  const orders = metricOrders(["distance", "exact"], "-bytes");
  assert.deepEqual(orders, [["exact", "by exact"], ["distance", "by distance, highest first"], ["-distance", "by distance, lowest first"]]);
});

test("a metric with the name of one of the server's own orders is told apart from it", () => {
  assert.deepEqual(metricOrders(["bytes"], "bytes").map(([sort]) => sort), ["val/bytes", "-val/bytes"]);
});

test("the order that was chosen is offered although no checkpoint has the metric now", () => {
  assert.deepEqual(metricOrders(["exact"], "-exact"), [["-exact", "by exact, lowest first"], ["exact", "by exact"]]);
  assert.deepEqual(metricOrders([], "winrate"), [["winrate", "by winrate"]]);
  assert.deepEqual(metricOrders([], "-loss"), [["-loss", "by loss, lowest first"]]);
});
