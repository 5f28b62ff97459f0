// Dark or light: as the system says, unless somebody has chosen; kept in this browser.

import { useEffect, useState } from "preact/hooks";

type Theme = "light" | "dark";
const CHOSEN = "opentinker-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();

export function theme(): Theme {
  const chosen = localStorage.getItem(CHOSEN);
  return chosen === "light" || chosen === "dark" ? chosen : system.matches ? "dark" : "light";
}

export function apply(): void {
  document.documentElement.dataset["theme"] = theme();
  for (const listener of listeners) listener();
}

export function toggle(): void {
  localStorage.setItem(CHOSEN, theme() === "dark" ? "light" : "dark");
  apply();
}

export function useTheme(): Theme {
  const [now, set] = useState(theme());
  useEffect(() => {
    const listener = (): void => set(theme());
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }, []);
  return now;
}

/** For a canvas: what a colour's variable is now. */
export function coloured(): (name: string) => string {
  const css = getComputedStyle(document.documentElement);
  return (name) => css.getPropertyValue(name).trim();
}

system.addEventListener("change", apply);
