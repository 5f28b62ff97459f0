// Evaluation episodes of two runs that have the same beginning.

interface Played {
  index: number;
  state?: number;
  sample?: number;
  messages: { role: string; content: string }[];
}

/** The first episode of each beginning that both have played, in order. */
export function pairs<T extends Played>(left: T[], right: T[]): [T, T][] {
  const others = new Map(firsts(right).map((one) => [beginning(one), one]));
  return firsts(left).flatMap((one): [T, T][] => {
    const other = others.get(beginning(one));
    return other && asked(one) === asked(other) ? [[one, other]] : [];
  });
}

function firsts<T extends Played>(episodes: T[]): T[] {
  return episodes.filter((one) => (one.sample ?? 0) === 0);
}

function beginning(one: Played): number {
  return one.state ?? one.index;
}

/** What the model was first asked: other rows may have the same number. */
function asked(one: Played): string {
  const first = one.messages.findIndex((message) => message.role === "assistant");
  return JSON.stringify(one.messages.slice(0, first < 0 ? undefined : first).map(({ role, content }) => [role, content]));
}
