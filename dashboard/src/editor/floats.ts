// Whole numbers that a text writes as floats. JavaScript tells 1.0 from 1 no more, but in a sweep an end of 1.0 means
// fractions, and an environment may get its config as it is written.

import { placesIn } from "./places.ts";

const WHOLE = /^[+-]?[\d_]+$/;
const FLOAT = /^[+-]?[\d_]+(\.[\d_]+)?([eE][+-]?[\d_]+)?$/;

/** The settings whose value is a whole number, written as a float: 1.0, 1e3. */
export function floatsIn(text: string): Set<string> {
  const written = placesIn(text).map((one) => [one.path, text.slice(one.valueFrom, one.valueTo)] as const);
  return new Set(written.flatMap(([path, value]) => (FLOAT.test(value) && !WHOLE.test(value) && Number.isInteger(Number(value.replaceAll("_", ""))) ? path : [])));
}

/** The text with these settings as floats, wherever it writes a whole number. */
export function withFloats(text: string, floats: ReadonlySet<string>): string {
  const ends = placesIn(text).flatMap((one) => (floats.has(one.path) && WHOLE.test(text.slice(one.valueFrom, one.valueTo)) ? one.valueTo : []));
  return ends.reduceRight((written, end) => `${written.slice(0, end)}.0${written.slice(end)}`, text);
}
