// Rows of a job's data set: queries for them, and the curve of their solved share.

export interface RowPoint {
  /** The last step of those that the point stands for. */
  step: number;
  played: number;
  /** Share of the episodes. */
  solved: number;
}

export interface DataRow {
  row: number;
  /** Where it stands, e.g. file and line. */
  place: string;
  prompt: string;
  /** Characters of the prompt that are not shown. */
  left_out: number;
  tokens: number | null;
  images: number;
  /** Turns that are learned, by column. */
  answers: Record<string, string>;
  problem: string;
  played: number;
  reward: number | null;
  solved: number | null;
  series: RowPoint[];
  /** Steps with episodes of it that can be read. */
  kept: number[];
}

export interface DataRows {
  rows: DataRow[];
  /** Those that pass the filters. */
  total: number;
  count: number;
  searched: number;
  /** Rows that were played at least once. */
  played: number;
  source: string;
  solved_at: number | null;
  first_step: number;
  note: string;
}

export const PAGE = 50;
/** Filters by solved share, as parameters in percent. */
export const SHARES: Record<string, Record<string, string>> = {
  "any share": {},
  "never solved": { most_solved: "0" },
  "sometimes solved": { solved_above: "0", solved_below: "100" },
  "always solved": { least_solved: "100" },
};

export interface Wanted {
  text: string;
  share: string;
  sort: string;
  page: number;
  policy: string;
}

export function queryOf({ text, share, sort, page, policy }: Wanted): string {
  const query = new URLSearchParams({ offset: String(page * PAGE), limit: String(PAGE) });
  if (text) query.set("text", text);
  for (const [name, percentage] of Object.entries(SHARES[share] ?? {})) query.set(name, percentage);
  if (sort !== "row") query.set("sort", sort);
  if (policy) query.set("policy", policy);
  return `?${query}`;
}

/** Points of a polyline in a box: from no episode solved at its bottom to all at its top. One point is drawn as a line. */
export function shareLine(series: RowPoint[], width: number, height: number): string {
  const shares = series.length === 1 ? [series[0]!, series[0]!] : series;
  const step = width / Math.max(1, shares.length - 1);
  return shares.map((point, at) => `${(at * step).toFixed(1)},${((1 - point.solved) * height).toFixed(1)}`).join(" ");
}

/** `12 %`; a share that is not quite 0 or 1 has a digit more, `99.5 %`; a dash for a row that was not played. */
export function percent(share: number | null): string {
  if (share === null) return "–";
  const value = 100 * share;
  if ((value > 0 && value < 1) || (value > 99 && value < 100)) return `${Math.min(Math.max(value, 0.1), 99.9).toFixed(1)} %`;
  return `${Math.round(value)} %`;
}

/** The line above the table. */
export function summary(of: DataRows): string {
  const said = [`${of.total.toLocaleString("en")} of ${of.count.toLocaleString("en")} rows of ${of.source}`];
  if (of.solved_at !== null) said.push(`${of.played.toLocaleString("en")} were played`, `solved: reward at least ${of.solved_at}`);
  if (of.searched < of.count) said.push(`only the first ${of.searched.toLocaleString("en")} were searched`);
  if (of.first_step) said.push(`counts begin with step ${of.first_step}`);
  if (of.note) said.push(`prompts are plain messages: ${of.note}`);
  return said.join(" · ");
}
