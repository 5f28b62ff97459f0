// The editor of a spec: colours, completion and hints from the schema, mistakes at their line as one types. Loaded when
// it is first shown. It lives in a shadow root, where its styles need no exception from the page's policy.

import { autocompletion, closeBrackets, completionKeymap, type Completion, type CompletionContext, type CompletionResult } from "@codemirror/autocomplete";
import { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
import { bracketMatching, HighlightStyle, StreamLanguage, syntaxHighlighting } from "@codemirror/language";
import { json } from "@codemirror/legacy-modes/mode/javascript";
import { toml } from "@codemirror/legacy-modes/mode/toml";
import { linter, lintGutter, lintKeymap, type Diagnostic } from "@codemirror/lint";
import { Compartment, EditorState, type Extension } from "@codemirror/state";
import { EditorView, highlightActiveLine, hoverTooltip, keymap, lineNumbers, placeholder, tooltips } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import type { Change } from "./change.ts";
import { isJson, placesIn } from "./places.ts";
import type { Schema } from "./schema.ts";
import { meaningAt, suggestions, type Suggestion } from "./suggest.ts";

const LINT_MS = 400;

export interface Mark {
  from: number;
  to: number;
  message: string;
}

export interface Asks {
  /** The text has changed, by its user. */
  changed: (text: string) => void;
  /** Find the mistakes in a text. */
  marks: (text: string) => Promise<Mark[]>;
  /** Values of a setting that the schema cannot know: environments, models, checkpoints. */
  known: (path: string) => string[];
  /** The schema of the spec as it is now: its environment has settings too. */
  schema: () => Schema;
}

export interface SpecEditor {
  /** Replace the whole text; `changed` is not called. */
  show: (text: string) => void;
  /** Replace a part of it, as its user would. */
  change: (change: Change) => void;
  goTo: (from: number) => void;
  close: () => void;
}

const COLOURS = HighlightStyle.define([
  { tag: [tags.propertyName, tags.definition(tags.propertyName)], color: "var(--accent)" },
  { tag: [tags.string, tags.special(tags.string)], color: "var(--good)" },
  { tag: [tags.number, tags.bool, tags.atom, tags.null], color: "var(--warn)" },
  { tag: [tags.comment, tags.lineComment], color: "var(--dim)", fontStyle: "italic" },
  { tag: tags.invalid, color: "var(--bad)" },
]);

const LOOK = EditorView.theme({
  "&": { fontSize: "12.5px", backgroundColor: "var(--card)", color: "var(--ink)", border: "1px solid var(--line)", borderRadius: "7px" },
  "&.cm-focused": { outline: "2px solid var(--accent)" },
  ".cm-scroller": { fontFamily: "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace", lineHeight: "1.5", minHeight: "24em" },
  ".cm-content": { caretColor: "var(--ink)", padding: "8px 0" },
  ".cm-gutters": { backgroundColor: "var(--card)", color: "var(--dim)", borderRight: "1px solid var(--line)" },
  ".cm-activeLine": { backgroundColor: "color-mix(in srgb, var(--accent) 6%, transparent)" },
  ".cm-tooltip": { backgroundColor: "var(--card)", color: "var(--ink)", border: "1px solid var(--line)", borderRadius: "7px", maxWidth: "32em" },
  ".cm-hint": { padding: "6px 10px", whiteSpace: "pre-wrap" },
  ".cm-tooltip-autocomplete ul li[aria-selected]": { backgroundColor: "var(--accent)", color: "var(--card)" },
  ".cm-completionInfo": { whiteSpace: "pre-wrap" },
  // without the pictures of the library, which the page's policy forbids
  ".cm-lintRange-error": { backgroundImage: "none", textDecoration: "underline wavy var(--bad)" },
  ".cm-lint-marker-error": { content: "normal", backgroundColor: "var(--bad)", borderRadius: "50%", width: "0.7em", height: "0.7em" },
  ".cm-diagnostic-error": { borderLeft: "3px solid var(--bad)" },
  ".cm-placeholder": { color: "var(--dim)" },
});

export function editSpec(host: HTMLElement, text: string, asks: Asks): SpecEditor {
  const root = host.shadowRoot ?? host.attachShadow({ mode: "open" });
  const language = new Compartment();
  let silent = false;
  let asJson = isJson(text);
  const look = linter((view) => marked(view.state.doc.toString(), asks), { delay: LINT_MS });
  const state = EditorState.create({
    doc: text,
    extensions: [
      lineNumbers(),
      history(),
      bracketMatching(),
      closeBrackets(),
      highlightActiveLine(),
      EditorView.lineWrapping,
      language.of(languageOf(asJson)),
      syntaxHighlighting(COLOURS),
      autocompletion({ override: [(context) => complete(context, asks)], activateOnTyping: true }),
      hoverTooltip((view, at) => hinted(view.state.doc.toString(), at, asks.schema())),
      tooltips({ parent: root as unknown as HTMLElement }),
      lintGutter(),
      look,
      // Tab leaves the editor, so that the keyboard reaches what follows it
      keymap.of([...completionKeymap, ...lintKeymap, ...historyKeymap, ...defaultKeymap]),
      placeholder("TOML or JSON: choose a template, open a file, or type"),
      EditorView.contentAttributes.of({ "aria-label": "Spec", spellcheck: "false" }),
      LOOK,
      EditorView.updateListener.of((update) => {
        if (!update.docChanged) return;
        const now = update.state.doc.toString();
        if (isJson(now) !== asJson) {
          asJson = !asJson;
          queueMicrotask(() => view.dispatch({ effects: language.reconfigure(languageOf(asJson)) }));
        }
        if (!silent) asks.changed(now);
      }),
    ],
  });
  const view = new EditorView({ state, parent: root, root });
  return {
    show: (whole) => {
      if (whole === view.state.doc.toString()) return;
      silent = true;
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: whole } });
      silent = false;
    },
    change: (change) => view.dispatch({ changes: change, scrollIntoView: true }),
    goTo: (from) => {
      view.dispatch({ selection: { anchor: Math.min(from, view.state.doc.length) }, scrollIntoView: true });
      view.focus();
    },
    close: () => view.destroy(),
  };
}

function languageOf(asJson: boolean): Extension {
  return StreamLanguage.define(asJson ? json : toml);
}

async function marked(text: string, asks: Asks): Promise<Diagnostic[]> {
  return (await asks.marks(text)).map((one) => ({ ...one, severity: "error" as const }));
}

const TYPES: Record<Suggestion["kind"], string> = { table: "namespace", setting: "property", constant: "constant", known: "text" };

function complete(context: CompletionContext, asks: Pick<Asks, "known" | "schema">): CompletionResult | null {
  const text = context.state.doc.sliceString(0, context.pos);
  const found = suggestions(text, asks.schema(), asks.known, context.explicit);
  if (!found) return null;
  const options = found.options.map(({ label, apply, kind, meaning }): Completion => ({ label, apply, type: TYPES[kind], ...(meaning ? { info: meaning } : {}) }));
  return { from: found.from, options, validFor: /^["'\w./:@-]*$/ };
}

/** What the setting means whose name is at this position. */
function hinted(text: string, at: number, schema: Schema): { pos: number; end: number; create: () => { dom: HTMLElement } } | null {
  const place = placesIn(text).find((one) => one.from <= at && at <= one.to && one.to > one.from && !/\.\d+$/.test(one.path));
  const hint = place ? meaningAt(schema, place.path) : "";
  if (!place || !hint) return null;
  return {
    pos: place.from,
    end: place.to,
    create: () => {
      const dom = document.createElement("div");
      dom.className = "cm-hint";
      dom.textContent = `${place.path}\n${hint}`;
      return { dom };
    },
  };
}
