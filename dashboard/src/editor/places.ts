// Where the settings of a spec are in its text, and what is written at a position. Reads TOML and JSON, and goes on
// after what it does not understand: a text is looked at while it is being typed.

/** A setting in the text. Offsets are in UTF-16 units. */
export interface Place {
  /** As mistakes name it: "train.lr", "tools.0.name". */
  path: string;
  /** The table that its name stands in, as the text has it: of `train.lr = 1` below no header "". */
  table: string;
  from: number;
  to: number;
  /** Its value; both are equal if it has none yet. */
  valueFrom: number;
  valueTo: number;
  /** What its value is: a table that stands below a header has the header's range as its value. */
  kind: "scalar" | "array" | "inline" | "header";
}

/** What is written at a position: the name of a setting in a table, or the value of a setting. */
export interface Spot {
  role: "name" | "value";
  /** Of a name: its table, "" at the top. Of a value: its setting. */
  path: string;
  from: number;
}

const BARE = /[A-Za-z0-9_-]/;

export function isJson(text: string): boolean {
  return text.trimStart().startsWith("{");
}

export function placesIn(text: string): Place[] {
  return new Scanner(text).run().places;
}

/** What a person is about to write at the end of this text; null: nothing that could be completed. */
export function spotAt(text: string): Spot | null {
  return new Scanner(text).run().spot;
}

/** The setting that a mistake is about, or the nearest table above it; null: the text has none of them. */
export function placeOf(places: Place[], field: string): Place | null {
  for (let path = field; path; path = path.includes(".") ? path.slice(0, path.lastIndexOf(".")) : "") {
    const found = places.find((one) => one.path === path);
    if (found) return found;
  }
  return null;
}

function join(path: string, name: string | number): string {
  return path ? `${path}.${name}` : String(name);
}

class Scanner {
  places: Place[] = [];
  spot: Spot | null = null;
  private at = 0;
  private listed = new Map<string, number>();

  private text: string;

  constructor(text: string) {
    this.text = text;
  }

  run(): Scanner {
    if (isJson(this.text)) {
      this.blanks();
      this.value("");
    } else this.document();
    return this;
  }

  private get ended(): boolean {
    return this.at >= this.text.length;
  }

  private blanks(lines = true): void {
    for (; !this.ended; this.at++) {
      const next = this.text[this.at]!;
      if (next === "#") while (!this.ended && this.text[this.at + 1] !== "\n") this.at++;
      else if (!(next === " " || next === "\t" || next === "\r" || (lines && next === "\n"))) return;
    }
  }

  private restOfLine(): void {
    while (!this.ended && this.text[this.at] !== "\n") this.at++;
  }

  private document(): void {
    let table = "";
    for (;;) {
      this.blanks();
      if (this.ended) {
        if (/(^|\n)[ \t]*$/.test(this.text)) this.spot ??= { role: "name", path: table, from: this.at };
        return;
      }
      const from = this.at;
      if (this.text[this.at] === "[") table = this.header();
      else this.entry(table);
      if (this.at === from) this.at++; // nothing was understood
    }
  }

  /** [a.b] or [[a.b]]. */
  private header(): string {
    const many = this.text.startsWith("[[", this.at);
    const from = this.at;
    this.at += many ? 2 : 1;
    const name = this.name("");
    let path = name.path;
    if (many) {
      const count = this.listed.get(path) ?? 0;
      this.listed.set(path, count + 1);
      path = join(path, count);
    }
    this.restOfLine();
    this.places.push({ path, table: "", from, to: this.at, valueFrom: from, valueTo: this.at, kind: "header" });
    return path;
  }

  /** A name, which may have dots, below a table. */
  private name(table: string): { path: string; from: number; to: number } {
    let path = table;
    const start = this.at;
    for (;;) {
      this.blanks(false);
      const from = this.at;
      const quote = this.text[this.at];
      if (quote === '"' || quote === "'") {
        const inner = this.quoted(quote);
        if (this.ended && !inner.closed) this.spot ??= { role: "name", path, from };
        path = join(path, inner.text);
      } else {
        while (!this.ended && BARE.test(this.text[this.at]!)) this.at++;
        if (this.ended) this.spot ??= { role: "name", path, from };
        path = join(path, this.text.slice(from, this.at));
      }
      const to = this.at;
      this.blanks(false);
      if (this.text[this.at] !== ".") return { path, from: start, to };
      this.at++;
    }
  }

  /** A name, = or :, a value. */
  private entry(table: string): void {
    const name = this.name(table);
    const sign = this.text[this.at];
    const place: Place = { ...name, table, valueFrom: this.at, valueTo: this.at, kind: "scalar" };
    if (name.to > name.from) this.places.push(place);
    if (sign !== "=" && sign !== ":") return sign === "}" || sign === "," ? undefined : this.restOfLine();
    this.at++;
    this.blanks(sign === ":");
    place.valueFrom = this.at;
    place.kind = this.value(name.path);
    place.valueTo = this.at;
  }

  private value(path: string): Place["kind"] {
    const from = this.at;
    if (this.ended) {
      this.spot ??= { role: "value", path, from };
      return "scalar";
    }
    const next = this.text[this.at]!;
    if (next === "{") return this.inline(path);
    if (next === "[") return this.array(path);
    if (next === '"' || next === "'") {
      if (!this.quoted(next).closed) this.spot ??= { role: "value", path, from };
      return "scalar";
    }
    while (!this.ended && !/[,\]}\n#]/.test(this.text[this.at]!)) this.at++;
    if (this.ended && !/\s$/.test(this.text)) this.spot ??= { role: "value", path, from };
    while (this.at > from && /\s/.test(this.text[this.at - 1]!)) this.at--;
    return "scalar";
  }

  private inline(path: string): Place["kind"] {
    this.at++;
    for (;;) {
      this.blanks();
      if (this.ended) this.spot ??= { role: "name", path, from: this.at };
      if (this.ended || this.text[this.at] === "}") break;
      const from = this.at;
      if (this.text[this.at] === ",") this.at++;
      else this.entry(path);
      if (this.at === from) break;
    }
    this.at = Math.min(this.at + 1, this.text.length);
    return "inline";
  }

  private array(path: string): Place["kind"] {
    this.at++;
    for (let count = 0; ; ) {
      this.blanks();
      if (this.ended) this.spot ??= { role: "value", path: join(path, count), from: this.at };
      if (this.ended || this.text[this.at] === "]") break;
      const from = this.at;
      if (this.text[this.at] === ",") this.at++;
      else {
        const place: Place = { path: join(path, count), table: path, from, to: from, valueFrom: from, valueTo: from, kind: "scalar" };
        this.places.push(place);
        place.kind = this.value(join(path, count++));
        place.to = place.valueTo = this.at;
      }
      if (this.at === from) break;
    }
    this.at = Math.min(this.at + 1, this.text.length);
    return "array";
  }

  private quoted(quote: string): { text: string; closed: boolean } {
    const long = this.text.startsWith(quote.repeat(3), this.at) ? 3 : 1;
    const close = quote.repeat(long);
    const from = (this.at += long);
    while (!this.ended && !this.text.startsWith(close, this.at)) {
      if (long === 1 && this.text[this.at] === "\n") return { text: this.text.slice(from, this.at), closed: false };
      this.at += quote === '"' && this.text[this.at] === "\\" ? 2 : 1;
    }
    const closed = !this.ended;
    const text = this.text.slice(from, this.at);
    this.at = Math.min(this.at + (closed ? long : 0), this.text.length);
    return { text, closed };
  }
}
