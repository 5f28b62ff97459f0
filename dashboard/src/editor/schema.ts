// What the server's JSON schema says about a setting: its meaning, its values, what a table may hold.

import type { Json } from "../lib/types.ts";

export interface Schema {
  $ref?: string;
  $defs?: Record<string, Schema>;
  anyOf?: Schema[];
  oneOf?: Schema[];
  allOf?: Schema[];
  type?: string;
  enum?: Json[];
  const?: Json;
  items?: Schema;
  prefixItems?: Schema[];
  properties?: Record<string, Schema>;
  patternProperties?: Record<string, Schema>;
  additionalProperties?: Schema | boolean;
  description?: string;
  default?: Json;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
}

/** Every form that a value may have, with references followed. */
function forms(schema: Schema | undefined, root: Schema): Schema[] {
  if (!schema) return [];
  const named = schema.$ref ? root.$defs?.[schema.$ref.slice(schema.$ref.lastIndexOf("/") + 1)] : undefined;
  const parts = [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? [])];
  return [schema, ...forms(named, root), ...parts.flatMap((one) => forms(one, root))];
}

/** The forms of the setting at a path; none if the schema has no such setting. */
export function formsAt(root: Schema, path: string): Schema[] {
  let found = forms(root, root);
  for (const part of path ? path.split(".") : []) {
    const inner = found.flatMap((one): (Schema | undefined)[] => {
      const own = one.properties?.[part];
      if (own) return [own];
      if (/^\d+$/.test(part)) return [one.prefixItems?.[Number(part)] ?? one.items];
      return [typeof one.additionalProperties === "object" ? one.additionalProperties : undefined, ...Object.values(one.patternProperties ?? {})];
    });
    found = inner.flatMap((one) => forms(one, root));
  }
  return found;
}

export interface Option {
  name: string;
  meaning: string;
  isTable: boolean;
}

/** The settings of a table. */
export function settingsOf(root: Schema, path: string): Option[] {
  const found = new Map<string, Option>();
  for (const form of formsAt(root, path)) {
    for (const [name, schema] of Object.entries(form.properties ?? {})) {
      const own = forms(schema, root);
      const isTable = own.some((one) => one.properties || one.type === "object");
      if (!found.has(name)) found.set(name, { name, meaning: meaningOf(own), isTable });
    }
  }
  return [...found.values()];
}

/** The values that a setting may have, if they can be listed. */
export function valuesOf(root: Schema, path: string): Json[] {
  const listed = formsAt(root, path).flatMap((one): Json[] => {
    if (one.enum) return one.enum;
    if (one.const !== undefined) return [one.const];
    return one.type === "boolean" ? [true, false] : [];
  });
  return [...new Set(listed)].filter((value) => value !== null);
}

function meaningOf(own: Schema[]): string {
  return own.find((one) => one.description)?.description ?? "";
}

/** What is said of a setting where the pointer rests on it; empty for one that the schema does not have. */
export function hintOf(root: Schema, path: string): string {
  const own = formsAt(root, path);
  if (!own.length) return "";
  const usual = own.find((one) => one.default !== undefined)?.default;
  const low = own.find((one) => (one.minimum ?? one.exclusiveMinimum) !== undefined);
  const high = own.find((one) => (one.maximum ?? one.exclusiveMaximum) !== undefined);
  const bounds = [
    low ? (low.minimum !== undefined ? `at least ${low.minimum}` : `more than ${low.exclusiveMinimum}`) : "",
    high ? (high.maximum !== undefined ? `at most ${high.maximum}` : `less than ${high.exclusiveMaximum}`) : "",
  ];
  const facts = [
    valuesOf(root, path).map((value) => JSON.stringify(value)).join(", "),
    ...bounds,
    usual === undefined || usual === null || typeof usual === "object" ? "" : `default ${JSON.stringify(usual)}`,
  ];
  return [meaningOf(own).replaceAll("`", ""), facts.filter(Boolean).join("; ")].filter(Boolean).join("\n");
}
