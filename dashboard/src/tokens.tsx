// An episode token by token, as the policy saw and sampled it, coloured by one of the things that are known of each.

import type { JSX } from "preact";
import { useMemo, useRef, useState } from "preact/hooks";
import { chosen } from "./lib/choosing.ts";
import type { Tokens } from "./lib/match.ts";
import { COLOURS } from "./lib/looks.ts";

export type Colour = "text" | "mask" | "logprob" | "advantage" | "version";

const LEAST_LOGPROB = 6;
const LEGENDS: Record<Colour, string> = {
  text: "",
  mask: "coloured: sampled by the policy",
  logprob: "redder: less likely; uncoloured: certain or not sampled",
  advantage: "green: reinforced; red: discouraged",
  version: "one colour per version of the weights",
};

export function Legend({ colour }: { colour: Colour }): JSX.Element | null {
  return LEGENDS[colour] ? <small class="dim">{LEGENDS[colour]}</small> : null;
}

interface Props {
  tokens: Tokens;
  colour: Colour;
  /** Versions in the order of their colours, where several texts share them; default: those of this text. */
  order?: string[];
  /** Whether it says how tokens are chosen. */
  hint?: boolean;
}

export function TokenText({ tokens, colour, order, hint = true }: Props): JSX.Element {
  const palette = useMemo(() => order ?? versionNames(tokens), [tokens, order]);
  const versions = useMemo(() => versionsOf(tokens), [tokens]);
  const [picked, setPicked] = useState<number | null>(null);
  const text = useRef<HTMLParagraphElement>(null);
  if (colour === "advantage" && !tokens.advantages) return <p class="empty">No advantages: another policy sampled these tokens, or the learner was simulated.</p>;
  const most = Math.max(1e-9, ...(tokens.advantages ?? []).map(Math.abs));
  const at = picked !== null && picked < tokens.text.length ? picked : null;
  const press = (event: KeyboardEvent): void => {
    const next = chosen(at, tokens.text.length, event.key);
    if (next === undefined) return;
    event.preventDefault();
    setPicked(next);
    if (next !== null) text.current?.children[next]?.scrollIntoView({ block: "nearest" });
  };
  const pick = (event: MouseEvent): void => {
    const found = [...(text.current?.children ?? [])].indexOf(event.target as Element);
    if (found >= 0 && found < tokens.text.length) setPicked(found);
  };
  return (
    <>
      <p
        class="tokens words"
        ref={text}
        tabIndex={0}
        role="group"
        aria-label="Tokens; arrow keys go from one to the next"
        onKeyDown={press}
        onClick={pick}
      >
        {tokens.text.map((word, i) => (
          <span
            key={i}
            class={i === at ? "picked" : undefined}
            title={about(tokens, versions, i)}
            style={{ background: paint(tokens, versions, palette, i, colour, most) }}
          >
            {word}
          </span>
        ))}
        {tokens.left_out > 0 && <small class="dim"> … {tokens.left_out} more tokens</small>}
      </p>
      <p class="chosen" role="status">
        {at === null ? (
          hint && <span class="dim">Select a token by click, touch or arrow keys.</span>
        ) : (
          <>
            <code>{JSON.stringify(tokens.text[at])}</code> {about(tokens, versions, at)}
          </>
        )}
      </p>
    </>
  );
}

function versionNames(tokens: Tokens): string[] {
  return [...new Set(tokens.versions.map(([, , version]) => version))];
}

/** The colour of a version, by its place among those that are shown together. */
export function versionColour(order: string[], version: string): string {
  return COLOURS[order.indexOf(version) % COLOURS.length] ?? "--dim";
}

/** By token: the version that sampled it. */
function versionsOf(tokens: Tokens): string[] {
  const found = new Array<string>(tokens.text.length).fill("");
  for (const [from, to, version] of tokens.versions) found.fill(version, from, to);
  return found;
}

function about(tokens: Tokens, versions: string[], i: number): string {
  const parts = [`token ${tokens.ids[i]}`];
  if (!tokens.mask[i]) return `${parts[0]}, not sampled`;
  const logprob = tokens.logprobs[i] ?? 0;
  parts.push(`p ${Math.exp(logprob).toFixed(3)} (logprob ${logprob.toFixed(2)})`);
  if (tokens.advantages) parts.push(`advantage ${(tokens.advantages[i] ?? 0).toFixed(3)}`);
  parts.push(`weights ${versions[i]}`);
  return parts.join(", ");
}

function paint(tokens: Tokens, versions: string[], palette: string[], i: number, colour: Colour, most: number): string {
  if (!tokens.mask[i]) return "transparent";
  switch (colour) {
    case "mask":
      return mixed("--accent", 28);
    case "logprob":
      return mixed("--bad", Math.min(1, -(tokens.logprobs[i] ?? 0) / LEAST_LOGPROB) * 65);
    case "advantage": {
      const value = tokens.advantages?.[i] ?? 0;
      return mixed(value < 0 ? "--bad" : "--good", (Math.abs(value) / most) * 60);
    }
    case "version":
      return mixed(versionColour(palette, versions[i] ?? ""), 35);
    default:
      return "transparent";
  }
}

function mixed(name: string, share: number): string {
  return `color-mix(in srgb, var(${name}) ${share.toFixed(0)}%, transparent)`;
}
