// What was said in an episode: as one conversation of its seats, or message by message.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { roleOf, seatOf, weightsIn, type Act, type Message, type Seat } from "../../lib/match.ts";
import { short } from "../../lib/words.ts";
import { TokenText, versionColour, type Colour } from "../../tokens.tsx";

/** PNG or JPEG in Base64, by digest. */
export type Images = Record<string, string>;

/** Of seats, in an order that keeps them apart for people who see fewer colours. */
const SEAT_COLOURS = ["--c1", "--c5", "--c4", "--c8", "--c7"];

/** All seats in the order of play: what each was shown, and what it said with the weights that said it. */
export function Match({ seats, acts, colour, images }: { seats: readonly Seat[]; acts: readonly Act[]; colour: Colour; images: Images | undefined }): JSX.Element {
  const order = weightsIn(acts);
  const names = seats.map(seatOf).sort();
  return (
    <>
      <p class="seats">
        {seats.map((view) => (
          <span key={seatOf(view)} data-seat={seatOf(view)}>
            <b>{seatOf(view)}</b> {view.policy && <small class="dim">played by {view.policy}</small>} {view.reward === undefined ? "" : short(view.reward)}
          </span>
        ))}
        {colour === "version" &&
          order.map((weights) => (
            <small key={weights} class="key">
              <i style={{ background: `var(${versionColour(order, weights)})` }} /> {weights}
            </small>
          ))}
      </p>
      <div class="talk match">
        {acts.map((act, i) => (
          <div
            key={i}
            class={act.message.turn === undefined ? "message shown" : "message"}
            style={{ borderLeftColor: `var(${SEAT_COLOURS[names.indexOf(act.seat) % SEAT_COLOURS.length]})` }}
          >
            <small>
              {act.message.turn === undefined ? (
                <>
                  to {act.seat} · {roleOf(act.message)}
                </>
              ) : (
                <>
                  <b>{act.seat}</b> · weights {act.weights.join(", ")}
                  {act.message.reward ? ` · reward ${short(act.message.reward)}` : ""}
                </>
              )}
            </small>
            {colour !== "text" && act.tokens ? (
              <TokenText tokens={act.tokens} colour={colour} order={order} hint={false} />
            ) : (
              <span class="words">{act.message.content}</span>
            )}
            <Pictures of={act.message} images={images} />
          </div>
        ))}
      </div>
    </>
  );
}

export function Talk({ messages, images }: { messages: Message[]; images: Images | undefined }): JSX.Element {
  return (
    <div class="talk">
      {messages.map((one, i) => (
        <p key={i} class={`message ${one.role}`}>
          <small>{roleOf(one)}</small>
          <span class="words">{one.content}</span>
          <Pictures of={one} images={images} />
        </p>
      ))}
    </div>
  );
}

function Pictures({ of, images = {} }: { of: Message; images: Images | undefined }): JSX.Element {
  const kept = (of.images ?? []).filter((digest) => images[digest]);
  return (
    <>
      {kept.map((digest, i) => (
        <Picture key={`${i} ${digest}`} data={images[digest]!} />
      ))}
    </>
  );
}

/** Shown as a blob, which the page's policy of content allows and data: URLs it does not. */
function Picture({ data }: { data: string }): JSX.Element {
  const [url, setUrl] = useState("");
  useEffect(() => {
    const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    const made = URL.createObjectURL(new Blob([bytes], { type: bytes[0] === 0xff ? "image/jpeg" : "image/png" }));
    setUrl(made);
    return () => URL.revokeObjectURL(made);
  }, [data]);
  return url ? <img class="picture" src={url} alt="An image of the message" /> : <></>;
}
