// A match as one conversation: what each seat was shown and said, in the order of play, each word with its policy's version.

/** Columns, one entry per token; `versions` as [from, to, version] of sampled ones. */
export interface Tokens {
  text: string[];
  ids: number[];
  mask: number[];
  logprobs: number[];
  advantages: number[] | null;
  versions: [number, number, string][];
  left_out: number;
}

export interface Message {
  role: string;
  content: string;
  /** Of the result of a tool call: the tool's name, and how long the call took. */
  tool?: string;
  call_ms?: number;
  /** Keys of its images among those of the episode, which has the first ones only. */
  images?: string[];
  /** Of words that a policy said: which turn of the episode, its tokens in the view, who sampled them, its reward. */
  turn?: number;
  tokens?: [number, number];
  versions?: string[];
  reward?: number;
  /** In an evaluation of several seats or contexts: whose it is. */
  seat?: string;
  stream?: string;
  policy?: string;
}

/** One context of a seat, and who plays it. */
export interface Seat {
  seat: string;
  stream: string;
  policy?: string | undefined;
  reward?: number | undefined;
}

/** Of an evaluation: the tokens of a seat in one context. */
export interface SeatTokens extends Seat {
  tokens?: Tokens | null | undefined;
}

export interface View extends SeatTokens {
  reward: number;
  messages: Message[];
}

/** Something that a seat was shown or said. */
export interface Act {
  seat: string;
  policy: string;
  /** Of what it said: the weights, with the policy's name where there are several. */
  weights: string[];
  message: Message;
  /** Of what it said, as far as they were kept. */
  tokens: Tokens | null;
}

/** Who says it: `user`, or `tool search · 12.3 ms`. */
export function roleOf(message: Message): string {
  const called = message.tool ? ` ${message.tool}` : "";
  return message.role + called + (message.call_ms === undefined ? "" : ` · ${message.call_ms} ms`);
}

/** The messages of all seats, in the order of play. */
export function conversation(views: readonly View[], order: readonly [number, number][]): Act[] {
  return order.flatMap(([place, number]) => {
    const view = views[place];
    const message = view?.messages[number];
    return view && message ? [actOf(view, message)] : [];
  });
}

/** The messages of an evaluation, and its seats; null where one seat plays. `kept`: tokens, of those that were kept. */
export function evaluated(messages: readonly Message[], kept: readonly SeatTokens[], rewards: Record<string, number>): { acts: Act[]; seats: Seat[] } | null {
  const seats = new Map<string, SeatTokens>();
  const acts = messages.map((message) => {
    const { seat = "", stream = "", policy } = message;
    const key = JSON.stringify([seat, stream]);
    const own = seats.get(key) ?? { seat, stream, policy, reward: rewards[seat], tokens: kept.find((one) => one.seat === seat && one.stream === stream)?.tokens };
    seats.set(key, own);
    return actOf(own, message);
  });
  return seats.size > 1 ? { acts, seats: [...seats.values()] } : null;
}

function actOf(view: SeatTokens, message: Message): Act {
  const said = message.turn !== undefined && message.tokens !== undefined && view.tokens;
  return {
    seat: seatOf(view),
    policy: view.policy ?? "",
    weights: (message.versions ?? []).map((version) => weightsOf(view, version)),
    message,
    tokens: said ? cut(view, view.tokens!, message.tokens!) : null,
  };
}

/** The weights of all that was said, in the order in which they first spoke. */
export function weightsIn(acts: readonly Act[]): string[] {
  return [...new Set(acts.flatMap((act) => act.weights))];
}

export function seatOf(view: Seat): string {
  return [view.seat || "player", view.stream].filter(Boolean).join(" ");
}

function weightsOf(view: Seat, version: string): string {
  return view.policy ? `${view.policy} ${version}` : version;
}

/** The tokens [from, to) of a view; null if none of them were kept. */
function cut(view: Seat, tokens: Tokens, [from, to]: [number, number]): Tokens | null {
  const end = Math.min(to, tokens.text.length);
  if (from >= end) return null;
  return {
    text: tokens.text.slice(from, end),
    ids: tokens.ids.slice(from, end),
    mask: tokens.mask.slice(from, end),
    logprobs: tokens.logprobs.slice(from, end),
    advantages: tokens.advantages && tokens.advantages.slice(from, end),
    versions: tokens.versions
      .map(([first, last, version]): [number, number, string] => [Math.max(first, from) - from, Math.min(last, end) - from, weightsOf(view, version)])
      .filter(([first, last]) => first < last),
    left_out: to - end,
  };
}
