// Reads a history until nothing is missing between what is there, or nobody has what is.
//
//   ask   consumes the history above what was read, again and again while there are gaps and there is patience

import { sizeOf, type Gap } from "./join.ts";

const PATIENCE_MS = [150, 400, 1000, 2500];

/** What may have gaps. */
export interface Gapped {
  gaps(): Gap[];
  /** The history has it no more. */
  giveUp(gap: Gap): void;
}

export class Refill {
  private filling: Promise<void> | null = null;
  private again = false;
  private closed = false;
  private readonly into: Gapped;
  private readonly read: () => Promise<void>;
  private readonly note: (missing: number, problem: string) => void;

  /** `note`: how many are being fetched, or why that failed; 0 and nothing at the end. */
  constructor(into: Gapped, read: () => Promise<void>, note: (missing: number, problem: string) => void) {
    this.into = into;
    this.read = read;
    this.note = note;
  }

  get busy(): boolean {
    return this.filling !== null;
  }

  /** Now, or once more after what goes on. */
  ask(): Promise<void> {
    this.again = this.filling !== null;
    this.filling ??= this.fill().finally(() => {
      this.filling = null;
      if (this.again && !this.closed) void this.ask();
    });
    return this.filling;
  }

  close(): void {
    this.closed = true;
  }

  private async fill(): Promise<void> {
    try {
      await this.read();
      for (const wait of PATIENCE_MS) {
        const gaps = this.into.gaps();
        if (!gaps.length) break;
        this.note(sizeOf(gaps), "");
        await new Promise((done) => setTimeout(done, wait));
        if (this.closed) return;
        await this.read();
      }
      if (this.closed) return;
      for (const gap of this.into.gaps()) this.into.giveUp(gap);
      this.note(0, "");
    } catch (error) {
      this.note(0, error instanceof Error ? error.message : String(error));
    }
  }
}
