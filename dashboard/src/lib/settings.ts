// Settings of an environment, as the JSON schema of its config describes them.

import type { About, Json } from "./types.ts";

export interface Setting {
  name: string;
  kind: string;
  /** As JSON; empty: a job must give it. */
  standard: string;
  meaning: string;
}

export function settingsOf(about: About): Setting[] {
  const required = about.settings.required ?? [];
  return Object.entries(about.settings.properties ?? {}).map(([name, given]) => {
    const one = (given && typeof given === "object" && !Array.isArray(given) ? given : {}) as Record<string, Json>;
    const standard = required.includes(name) || !("default" in one) ? "" : JSON.stringify(one["default"]);
    return { name, kind: kindOf(one), standard, meaning: typeof one["description"] === "string" ? one["description"] : "" };
  });
}

function kindOf(one: Record<string, Json>): string {
  if (Array.isArray(one["enum"])) return one["enum"].map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in one) return JSON.stringify(one["const"]);
  if (Array.isArray(one["anyOf"])) return one["anyOf"].map((part) => kindOf((part ?? {}) as Record<string, Json>)).join(" | ");
  if (typeof one["$ref"] === "string") return one["$ref"].split("/").at(-1) ?? "object";
  return typeof one["type"] === "string" ? one["type"] : "any";
}

/** The config that a person wrote as JSON; a text that is none is an error in words. */
export function configOf(text: string): Record<string, Json> {
  if (!text.trim()) return {};
  const found: unknown = JSON.parse(text);
  if (found === null || typeof found !== "object" || Array.isArray(found)) throw new SyntaxError("not an object, such as {\"digits\": 3}");
  return found as Record<string, Json>;
}
