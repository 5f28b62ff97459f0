// What the lists of jobs and of sweeps show: filters, order and grouping, as the address has them.

export const PROPERTIES = ["project", "tag", "name", "kind", "environment", "model", "owner", "state", "notes"] as const;
export type Property = (typeof PROPERTIES)[number];
/** A property by which jobs and sweeps are filtered and grouped, and its value. */
export type Label = [Property, string];

export const groupings: [string, string][] = [["", "no groups"], ...PROPERTIES.map((one): [string, string] => [one, `by ${one}`])];

export interface ListView {
  search: string;
  /** By the API's name; with a leading "-" the other way around. */
  sort: string;
  by: Property | "";
  labels: Label[];
}

export const FIRST_SORT = "state";
/** By the API's name of the order. */
export const SORTS: [string, string][] = [
  ["state", "running first"],
  ["created", "newest first"],
  ["updated", "last changed first"],
  ["finished", "last ended first"],
  ["step", "most steps first"],
  ["name", "by name"],
  ["kind", "by kind"],
  ["project", "by project"],
  ["tag", "by tags"],
  ["notes", "by notes"],
  ["environment", "by environment"],
  ["model", "by model"],
  ["owner", "by owner"],
];
/** A sweep has no steps. */
export const SWEEP_SORTS = SORTS.filter(([name]) => name !== "step");
/** The order of a column of the table. */
export const SORT_OF: Record<string, string> = {
  Job: "name", State: "state", Progress: "step", Time: "created", Kind: "kind", Environment: "environment", Model: "model", Project: "project",
  Owner: "owner", Notes: "notes", Updated: "updated", Finished: "finished",
}; // prettier-ignore
const LARGEST_FIRST = new Set(["created", "updated", "finished", "step"]);

export function viewOf(query: string): ListView {
  const given = new URLSearchParams(query);
  const labels = PROPERTIES.flatMap((name): Label[] => {
    const value = given.get(name) ?? "";
    return (name === "tag" ? value.split(",") : [value]).filter(Boolean).map((one) => [name, one]);
  });
  const by = PROPERTIES.find((name) => name === given.get("by")) ?? "";
  return { search: given.get("search") ?? "", sort: given.get("sort") || FIRST_SORT, by, labels };
}

/** What differs from the list as it is first shown. */
export function queryOf(view: ListView): string {
  const query = valuesOf(view.labels);
  if (view.search) query.set("search", view.search);
  if (view.sort !== FIRST_SORT) query.set("sort", view.sort);
  if (view.by) query.set("by", view.by);
  return `${query}`;
}

function valuesOf(labels: Label[]): URLSearchParams {
  const query = new URLSearchParams(labels.filter(([name]) => name !== "tag"));
  const tags = labels.filter(([name]) => name === "tag").map(([, tag]) => tag);
  if (tags.length) query.set("tag", tags.join(","));
  return query;
}

/** The filters as the API takes them, whose `name` and `notes` are a part of them. */
export function filterOf({ labels, search }: Pick<ListView, "labels" | "search">): URLSearchParams {
  const query = valuesOf(labels);
  for (const part of ["name", "notes"]) {
    const whole = query.get(part);
    query.delete(part);
    if (whole) query.set(`${part}_is`, whole);
  }
  if (search.trim()) query.set("search", search.trim());
  return query;
}

/** The value of a property that the filter asks for; of tags the first. */
export function valueOf(labels: Label[], name: Property): string {
  return labels.find(([other]) => other === name)?.[1] ?? "";
}

/** The labels without this one; an empty value stands for all of its property. */
export function without(labels: Label[], [name, value]: Label): Label[] {
  return labels.filter(([other, own]) => other !== name || (name === "tag" && value !== "" && own !== value));
}

/** A job or a sweep has several tags, but one value of all else. */
export function withLabel(labels: Label[], label: Label): Label[] {
  const rest = without(labels, label);
  return label[1] ? [...rest, label] : rest;
}

/** The order after a click on a column's head: its own, and the other way around if it is that already. */
export function sortedBy(sort: string, column: string): string {
  const own = SORT_OF[column];
  return !own ? sort : sort === own ? `-${own}` : own;
}

/** For `aria-sort` of a column's head. */
export function sortDirectionOf(sort: string, column: string): "ascending" | "descending" | undefined {
  const name = sort.replace(/^-/, "");
  if (SORT_OF[column] !== name) return undefined;
  return LARGEST_FIRST.has(name) === sort.startsWith("-") ? "ascending" : "descending";
}

/** The orders to choose from, with the present one. */
export function sortsFor(sort: string, of = SORTS): [string, string][] {
  const text = of.find(([name]) => `-${name}` === sort)?.[1];
  return text ? [...of, [sort, `${text}, reversed`]] : of;
}
