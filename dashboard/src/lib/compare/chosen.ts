// The metrics that the address of a comparison names.

const EACH = "metric";
/** One list, separated by commas, of links that were made before metrics could have commas. */
const LIST = "metrics";

/** null: the address names none. */
export function chosenMetrics(query: URLSearchParams): string[] | null {
  const names = query.has(EACH) ? query.getAll(EACH) : (query.get(LIST)?.split(",") ?? []);
  const own = [...new Set(names.filter(Boolean))];
  return own.length ? own : null;
}

/** The query with these metrics, each by itself. */
export function withMetrics(query: URLSearchParams, names: string[]): URLSearchParams {
  const changed = new URLSearchParams(query);
  changed.delete(LIST);
  changed.delete(EACH);
  for (const name of names) changed.append(EACH, name);
  return changed;
}
