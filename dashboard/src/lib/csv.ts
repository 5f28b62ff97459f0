// Tables as text for spreadsheets.

/** What a spreadsheet may take for the beginning of a formula. */
const FORMULA = /^[=+@\t\r-]/;

/** A text that a spreadsheet would take for a formula gets an apostrophe. */
export function csv(rows: readonly (readonly string[])[]): string {
  const cell = (text: string): string => {
    const plain = FORMULA.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;
    return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
