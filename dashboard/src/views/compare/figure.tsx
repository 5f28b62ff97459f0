// A drawing of a comparison that can be taken away: as PNG, and in the HTML of the whole view.

import type { ComponentChildren, JSX } from "preact";
import { useRef } from "preact/hooks";
import { coloured } from "../../theme.ts";
import { fileName, save } from "../../lib/words.ts";

/** What the style sheet says of a drawing's parts, as attributes: the page's policy lets no style be written into them. */
const STYLED = ["fill", "stroke", "stroke-width", "opacity", "font-family", "font-size", "text-anchor"];
const SCALE = 2;

interface Props {
  title: string;
  look: string;
  children: ComponentChildren;
}

/** `children`: one svg. */
export function Figure({ title, look, children }: Props): JSX.Element {
  const place = useRef<HTMLElement>(null);
  const png = (): void => {
    const drawing = place.current?.querySelector("svg");
    if (drawing) void picture(title, drawing);
  };
  return (
    <figure ref={place} class={`card ${look}`} data-drawing={title}>
      <figcaption class="bar">
        <span>{title}</span>
        <span class="spring" />
        <span class="tools">
          <button title="Save as PNG" aria-label={`${title} as PNG`} onClick={png}>
            png
          </button>
        </span>
      </figcaption>
      {children}
    </figure>
  );
}

/** The drawing as a document that needs no style sheet. */
export function alone(drawing: SVGSVGElement): string {
  const copy = drawing.cloneNode(true) as SVGSVGElement;
  const [from, to] = [drawing, copy].map((one) => [...one.querySelectorAll<SVGElement>("*")]) as [SVGElement[], SVGElement[]];
  from.forEach((element, at) => {
    const css = getComputedStyle(element);
    to[at]!.removeAttribute("style");
    for (const name of STYLED) to[at]!.setAttribute(name, css.getPropertyValue(name));
  });
  const [, , width, height] = (drawing.getAttribute("viewBox") ?? "0 0 400 200").split(" ");
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", width!);
  copy.setAttribute("height", height!);
  copy.removeAttribute("class");
  return new XMLSerializer().serializeToString(copy);
}

async function picture(title: string, drawing: SVGSVGElement): Promise<void> {
  const url = URL.createObjectURL(new Blob([alone(drawing)], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = image.width * SCALE;
    canvas.height = (image.height + 26) * SCALE;
    const pen = canvas.getContext("2d")!;
    const colour = coloured();
    pen.scale(SCALE, SCALE);
    pen.fillStyle = colour("--card");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = colour("--ink");
    pen.font = "600 13px system-ui";
    pen.fillText(title, 10, 18);
    pen.drawImage(image, 0, 26);
    const blob = await new Promise<Blob | null>((done) => canvas.toBlob(done, "image/png"));
    if (blob) save(`${fileName(title)}.png`, blob);
  } finally {
    URL.revokeObjectURL(url);
  }
}
