// Job files to begin with: the examples of this release, each with the curve that it had when it was recorded, or why it has none.

import expected from "../../../examples/curves.json";

const FILES = import.meta.glob<string>(["../../../examples/**/*.toml", "!../../../examples/**/environment.toml", "!../../../examples/data/**"], { query: "?raw", import: "default", eager: true });

const FOLDER = "/examples/";

/** What an example does when it is run: its curve, or of a sweep the best value so far after each trial. */
export interface Curve {
  metric: string;
  values: number[];
  steps?: number;
  trials?: number;
  /** Of the settings that it was recorded with. */
  digest?: string;
  /** What to see in it. */
  note?: string;
}

export interface Template {
  name: string;
  curve: Curve | null;
  /** Why there is no curve, or what to see in it. */
  note: string;
  text: string;
}

const EXPECTED = expected as Record<string, Curve | { note: string }>;

export const TEMPLATES: Template[] = Object.entries(FILES).map(([path, text]) => {
  const name = path.slice(path.indexOf(FOLDER) + FOLDER.length, -".toml".length);
  const found = EXPECTED[name];
  return { name, curve: found && "values" in found ? found : null, note: found?.note ?? "", text };
});
