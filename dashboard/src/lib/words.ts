// Numbers and times as people read them.

export function short(value: number | undefined | null): string {
  if (value === undefined || value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (size === 0 || Number.isInteger(value)) return String(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 1) return value.toFixed(2);
  if (size >= 0.001) return value.toFixed(4).replace(/0+$/, "");
  return value.toExponential(1);
}

/** 1 point, 2 points. */
export function counted(count: number, noun: string): string {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

export function bytes(count: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = count;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? size : size.toFixed(1)} ${units[unit]}`;
}

/** 47 s, 3:12 min, 2:05 h, 3 d 4 h. */
export function duration(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  const two = (n: number): string => String(Math.floor(n)).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)} min`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}:${two((whole % 3600) / 60)} h`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function clock(unix: number): string {
  return new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
}

export function moment(unix: number): string {
  return new Date(unix * 1000).toLocaleString([], { hour12: false, dateStyle: "medium", timeStyle: "short" });
}

/** 47 s ago, 18 min ago, 5 h ago, 3 d ago: as the command line says it. */
export function ago(unix: number, now = Date.now() / 1000): string {
  const seconds = Math.max(0, now - unix);
  const [size, unit] = seconds < 90 ? [1, "s"] : seconds < 5400 ? [60, "min"] : seconds < 129600 ? [3600, "h"] : [86400, "d"];
  return `${Math.round(seconds / Number(size))} ${unit} ago`;
}

/** A title as the name of a file, without its ending. */
export function fileName(title: string): string {
  return title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
}

/** Hands a file to the browser. */
export function save(name: string, data: Blob): void {
  const url = URL.createObjectURL(data);
  download(name, url);
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Has the browser load a file by itself. */
export function download(name: string, url: string): void {
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
}
