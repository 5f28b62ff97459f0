// The page: who looks, the way around, and the view that the address names.

import { render, type JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Who, useAddress, useGoKeys } from "./hooks.ts";
import { ask, keepShareKey, login, Problem, shareKey, signIn, signOut, type Login } from "./lib/api.ts";
import type { Me } from "./lib/types.ts";
import "./style.css";
import { apply, toggle, useTheme } from "./theme.ts";
import { Cluster } from "./views/cluster.tsx";
import { Compare } from "./views/compare/compare.tsx";
import { EnvironmentView, JobPlay } from "./views/environments/environment.tsx";
import { CheckView, Environments } from "./views/environments/environments.tsx";
import { JobView } from "./views/job/job.tsx";
import { Models } from "./views/models.tsx";
import { Jobs } from "./views/jobs/jobs.tsx";
import { Submit } from "./views/submit.tsx";
import { Sweeps, SweepView } from "./views/sweeps.tsx";

type Gate = { at: "asking" } | { at: "out"; said: string; provider: Login["provider"] } | { at: "in"; me: Me; open: boolean } | { at: "away"; said: string };
const AGAIN_MS = 1500;
/** In the tab's storage: the address at which its user went to sign in elsewhere. */
const LEFT_AT = "opentinker-left-at";

function App(): JSX.Element {
  const [gate, set] = useState<Gate>({ at: "asking" });
  const enter = async (said = ""): Promise<void> => {
    try {
      const { auth, csrf, provider, problem } = await login();
      const open = auth === "off";
      if (!open && !csrf && !shareKey()) set({ at: "out", said: said || (problem ?? ""), provider });
      else set({ at: "in", me: await ask<Me>("/v1/whoami"), open });
    } catch (error) {
      if (error instanceof Problem && error.status === 401) {
        keepShareKey("");
        return void enter(error.message);
      }
      set({ at: "away", said: messageOf(error) });
      setTimeout(() => void enter(), AGAIN_MS);
    }
  };
  useEffect(() => {
    void enter();
    const refused = (): void => void enter();
    const moved = (): void => {
      if (!takeShared()) return;
      set({ at: "asking" }); // what the views have asked for was for another key
      void enter();
    };
    window.addEventListener("key-refused", refused);
    window.addEventListener("hashchange", moved, true); // before the views read the address
    return () => {
      window.removeEventListener("key-refused", refused);
      window.removeEventListener("hashchange", moved, true);
    };
  }, []);
  const use = (text: string): void => {
    signIn(text.trim())
      .then(() => enter())
      .catch((error: unknown) => enter(messageOf(error)));
  };
  useGoKeys();
  const leave = (): void => void signOut().catch(() => null).then(() => enter());
  return (
    <>
      <Head me={gate.at === "in" ? gate.me : null} leave={leave} />
      {gate.at === "in" && gate.open && (
        <p class="loud" role="status">
          This server requires no key: anyone on this machine is an operator.
        </p>
      )}
      <main>
        {gate.at === "asking" && <p class="empty">Loading…</p>}
        {gate.at === "away" && <p class="empty">{gate.said}; retrying.</p>}
        {gate.at === "out" && <SignIn said={gate.said} provider={gate.provider} use={use} />}
        {gate.at === "in" && (
          <Who.Provider value={gate.me}>
            <View shared={gate.me.jobs} />
          </Who.Provider>
        )}
      </main>
    </>
  );
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** An address #/share/KEY/... : take its key for this tab, and go on to the rest. Returns whether it was one. */
function takeShared(): boolean {
  const [, text, rest] = /^#\/share\/(\w+)\/(.*)$/.exec(location.hash) ?? [];
  if (!text) return false;
  keepShareKey(text);
  history.replaceState(null, "", `#/${rest}`);
  return true;
}

function keepAddress(): void {
  sessionStorage.setItem(LEFT_AT, location.hash);
}

/** The provider has sent the user back, to the address without a view: go on to the one that was left. */
function takeAddress(): void {
  const left = sessionStorage.getItem(LEFT_AT);
  sessionStorage.removeItem(LEFT_AT);
  if (left && /^(#\/?)?$/.test(location.hash)) history.replaceState(null, "", left);
}

function View({ shared }: { shared: string[] }): JSX.Element {
  const [view, id, part, at] = useAddress();
  if (shared.length && view !== "compare" && !(view === "jobs" && id)) return <Shared jobs={shared} />;
  if (view === "cluster") return <Cluster />;
  if (view === "compare") return <Compare ids={(id ?? "").split(",").filter(Boolean)} view={part ?? ""} />;
  if (view === "environments") return id ? <CheckView key={id} id={id} /> : <Environments />;
  if (view === "environment" && id) return <EnvironmentView key={id} name={id} />;
  if (view === "play" && id) return <JobPlay key={`${id} ${part}`} id={id} row={part ?? "0"} />;
  if (view === "sweeps") return id ? <SweepView key={id} id={id} /> : <Sweeps />;
  if (view === "checkpoints") return <Models />;
  if (view === "submit") return <Submit from={id ?? ""} step={part ?? ""} />;
  if (view === "jobs" && id) return <JobView key={id} id={id} part={part ?? ""} at={at ?? ""} />;
  if (view === undefined || view === "jobs") return <Jobs />;
  return (
    <section class="card">
      <h1>Page not found</h1>
      <p>
        There is no page at this address. <a href="#/">All jobs</a>
      </p>
    </section>
  );
}

function Shared({ jobs }: { jobs: string[] }): JSX.Element {
  return (
    <section class="card">
      <h1>Shared with you</h1>
      <ul>
        {jobs.map((id) => (
          <li key={id}>
            <a href={`#/jobs/${id}`}>{id}</a>
          </li>
        ))}
        {jobs.length > 1 && (
          <li>
            <a href={`#/compare/${jobs.join(",")}`}>all compared</a>
          </li>
        )}
      </ul>
    </section>
  );
}

function Head({ me, leave }: { me: Me | null; leave: () => void }): JSX.Element {
  const [view] = useAddress();
  const theme = useTheme();
  const link = (to: string, text: string, on: boolean): JSX.Element => (
    <a href={`#/${to}`} aria-current={on ? "page" : undefined}>
      {text}
    </a>
  );
  return (
    <header class="head">
      <a class="brand" href="#/">
        <img src="/page/icon.svg" alt="" width="22" height="22" />
        OpenTinker
      </a>
      {me && !me.jobs.length && (
        <nav>
          {link("", "Jobs", view === undefined || view === "jobs" || view === "sweeps")}
          {link("checkpoints", "Models", view === "checkpoints")}
          {me.scopes.includes("environments:read") && link("environments", "Environments", view === "environments" || view === "environment")}
          {link("cluster", "Cluster", view === "cluster")}
          {me.scopes.includes("jobs:write") && link("submit", "Submit", view === "submit")}
          <a class="wide" href="/docs">
            API
          </a>
        </nav>
      )}
      <span class="spring" />
      {me && (
        <small class="dim who">
          {me.jobs.length ? "shared with you" : `${me.user ? `${me.user}, ` : ""}${me.role} of ${me.tenant}`}
        </small>
      )}
      {(me?.key || me?.user) && (
        <button class="plain" onClick={leave}>
          Sign out
        </button>
      )}
      <button class="plain" onClick={toggle} aria-label={theme === "dark" ? "Light" : "Dark"} title="Dark or light theme">
        {theme === "dark" ? "☀" : "☾"}
      </button>
    </header>
  );
}

interface SignInProps {
  said: string;
  provider: Login["provider"];
  use: (key: string) => void;
}

function SignIn({ said, provider, use }: SignInProps): JSX.Element {
  const [text, set] = useState("");
  const submit = (event: Event): void => {
    event.preventDefault();
    if (text.trim()) use(text);
  };
  return (
    <form class="card key-form" onSubmit={submit}>
      <h1>{provider ? "Sign in" : "API key required"}</h1>
      {said && (
        <p class="problem" role="alert">
          {said}
        </p>
      )}
      {provider && (
        <>
          <a class="button" href={provider.address} onClick={keepAddress}>
            Sign in with {provider.name}
          </a>
          <p class="dim">or with a key:</p>
        </>
      )}
      <label>
        API key
        <input
          type="password"
          name="key"
          autoComplete="off"
          spellcheck={false}
          autofocus={!provider}
          placeholder="ot_…"
          value={text}
          onInput={(event) => set(event.currentTarget.value)}
        />
      </label>
      <p class="dim">
        The page uses the key to sign in and does not keep it. The operator&apos;s key is in <code>DATA_DIR/run/operator-key</code> on the
        server; create others with <code>opentinker keys create</code>.
      </p>
      <button type="submit">{provider ? "Sign in with the key" : "Sign in"}</button>
    </form>
  );
}

apply();
takeShared();
takeAddress();
render(<App />, document.getElementById("app")!);
