// A job's spec beside the defaults that the server's own schema names.

import type { Json } from "./types.ts";

export interface Schema {
  $ref?: string;
  anyOf?: Schema[];
  properties?: Record<string, Schema>;
  default?: Json;
  description?: string;
}

export interface Setting {
  path: string;
  value: Json;
  /** Undefined: there is none, it has to be given. */
  usual: Json | undefined;
  differs: boolean;
  meaning: string;
}

type Schemas = Record<string, Schema>;

function isObject(value: Json | undefined): value is { [name: string]: Json } {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function resolved(schema: Schema | undefined, schemas: Schemas): Schema | undefined {
  if (!schema) return undefined;
  const ref = schema.$ref ?? schema.anyOf?.find((one) => one.$ref)?.$ref;
  const found = ref ? schemas[ref.slice(ref.lastIndexOf("/") + 1)] : undefined;
  return found ? { ...found, ...(schema.default !== undefined ? { default: schema.default } : {}) } : schema;
}

export function same(a: Json | undefined, b: Json | undefined): boolean {
  if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((one, i) => same(one, b[i]));
  if (isObject(a) && isObject(b)) {
    const all = new Set([...Object.keys(a), ...Object.keys(b)]);
    return [...all].every((name) => same(a[name], b[name]));
  }
  return a === b;
}

/** Every setting, in the order of the spec. */
export function settings(spec: Json, schemas: Schemas, root = "JobSpec"): Setting[] {
  const found: Setting[] = [];
  const look = (value: Json, schema: Schema | undefined, path: string, usual: Json | undefined, meaning: string): void => {
    const own = resolved(schema, schemas);
    if (isObject(value) && own?.properties) {
      for (const [name, part] of Object.entries(value)) {
        const inner = own.properties[name];
        const base = isObject(usual) && name in usual ? usual[name] : inner?.default;
        look(part, inner, path ? `${path}.${name}` : name, base, inner?.description ?? "");
      }
      return;
    }
    found.push({ path, value, usual, differs: !same(value, usual), meaning });
  };
  look(spec, schemas[root], "", undefined, "");
  return found;
}
