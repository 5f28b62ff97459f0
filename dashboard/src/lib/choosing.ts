// What keys choose in a line of things.

/** Where a key leads from `at`; null: nothing is chosen any more; undefined: the key means nothing here. */
export function chosen(at: number | null, count: number, key: string): number | null | undefined {
  if (key === "Escape") return at === null ? undefined : null;
  if (!count) return undefined;
  const last = count - 1;
  switch (key) {
    case "ArrowRight":
      return at === null ? 0 : Math.min(last, at + 1);
    case "ArrowLeft":
      return at === null ? last : Math.max(0, at - 1);
    case "Home":
      return 0;
    case "End":
      return last;
    default:
      return undefined;
  }
}
