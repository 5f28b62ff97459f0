// Job files to begin with: the examples of this release, each with the curve that it had when it was recorded.

import curves from "../../../examples/curves.json";

const FILES = import.meta.glob<string>("../../../examples/*.toml", { query: "?raw", import: "default", eager: true });

export interface Curve {
  metric: string;
  values: number[];
  steps: number;
  seconds: number;
}

export interface Template {
  name: string;
  curve: Curve | null;
  text: string;
}

export const TEMPLATES: Template[] = Object.entries(FILES).map(([path, text]) => {
  const name = path.slice(path.lastIndexOf("/") + 1, -".toml".length);
  return { name, curve: (curves as Record<string, Curve>)[name] ?? null, text };
});
