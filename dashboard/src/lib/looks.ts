// Colours and dashes of lines: how many lines of a chart are told apart.

/** Of lines and versions, by the names of their variables in the style sheet. */
export const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
/** Drawn and blank pixels, in turn. */
export const PATTERNS = [[], [6, 3], [2, 3], [9, 3, 2, 3], [14, 4], [9, 3, 2, 3, 2, 3], [4, 7]];

export interface LineLook {
  colour: number;
  pattern: number;
}

/** The look of the line at a place, different for each of the first 56: all colours, then all of them dashed, ... */
export function lookOf(place: number): LineLook {
  return { colour: place % COLOURS.length, pattern: Math.floor(place / COLOURS.length) % PATTERNS.length };
}

/** The background of a short sample of a line. */
export function sampleOf(colour: string, dashes: readonly number[]): string {
  const stroke = `var(${colour})`;
  if (!dashes.length) return stroke;
  let at = 0;
  const stops = dashes.map((length, place) => `${place % 2 ? "transparent" : stroke} ${at}px ${(at += length)}px`);
  return `repeating-linear-gradient(90deg, ${stops.join(", ")})`;
}

/** Where items of these widths stand in lines of a width: left edge and line of each. One that is wider has its own line. */
export function wrapped(widths: readonly number[], room: number, gap: number): { x: number; line: number }[] {
  let x = 0;
  let line = 0;
  return widths.map((width) => {
    if (x > 0 && x + width > room) {
      x = 0;
      line += 1;
    }
    const place = { x, line };
    x += width + gap;
    return place;
  });
}
