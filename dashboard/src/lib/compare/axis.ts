// An axis of numbers: where values stand on it, and which of them are written beside it.

/** Positive numbers of which the largest is so many times the smallest are shown by orders of magnitude. */
export const WIDE = 20;
const STEPS = [1, 2, 2.5, 5, 10];
const ROOM = 0.06;

export interface NumberAxis {
  isLog: boolean;
  ticks: number[];
  /** From 0 to 1. */
  place: (value: number) => number;
}

export function isWide(low: number, high: number): boolean {
  return low > 0 && high / low >= WIDE;
}

/** The axis of these values, with a little room at both ends and about `count` ticks. `mayLog`: by orders of magnitude if they are wide. */
export function axisOver(values: readonly number[], count: number, mayLog: boolean): NumberAxis {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const isLog = mayLog && isWide(low, high);
  const scaled = isLog ? Math.log : (value: number): number => value;
  const span = scaled(high) - scaled(low) || Math.abs(scaled(high)) || 1;
  const [from, to] = [scaled(low) - ROOM * span, scaled(high) + ROOM * span];
  const place = (value: number): number => (scaled(value) - from) / (to - from);
  const ticks = isLog ? magnitudes(low, high) : rounds(low - ROOM * span, high + ROOM * span, count);
  return { isLog, ticks: ticks.filter((tick) => place(tick) >= 0 && place(tick) <= 1), place };
}

/** Round numbers between two. */
function rounds(low: number, high: number, count: number): number[] {
  const raw = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * STEPS.find((one) => one * unit >= raw * 0.999)!;
  const found: number[] = [];
  for (let at = Math.ceil(low / step); at * step <= high; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

/** Powers of ten between two numbers, or the two where there are fewer than two. */
function magnitudes(low: number, high: number): number[] {
  const found: number[] = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); 10 ** power <= high * 1.000001; power += 1) found.push(10 ** power);
  return found.length > 1 ? found : [low, high];
}
