// A conversation with what an inference job serves, word by word over its OpenAI route.

import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { useMay } from "../../hooks.ts";
import { events, fetched, job as path, Problem } from "../../lib/api.ts";
import { adaptersOf } from "../../lib/serve.ts";
import { FINAL, type JobDetail } from "../../lib/types.ts";
import { Empty, Said, Select } from "../../parts.tsx";

interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

export function Chat({ job }: { job: JobDetail }): JSX.Element {
  const may = useMay("inference:use");
  const [said, setSaid] = useState<Message[]>([]);
  const [text, setText] = useState("");
  const [system, setSystem] = useState("");
  const [temperature, setTemperature] = useState(0.7);
  const [model, setModel] = useState("");
  const [most, setMost] = useState(256);
  const [problem, setProblem] = useState<Problem | null>(null);
  const stop = useRef<AbortController | null>(null);
  const [busy, setBusy] = useState(false);
  if (!may) return <Empty>Your key does not allow using models. Sign in with one that has the scope inference:use, such as a member's.</Empty>;
  if (FINAL.includes(job.state)) return <Empty>This job has ended. Clone it to serve the model again.</Empty>;

  const adapters = adaptersOf(job);
  const answer = async (messages: Message[]): Promise<void> => {
    stop.current = new AbortController();
    setBusy(true);
    setProblem(null);
    setSaid([...messages, { role: "assistant", content: "" }]);
    let whole = "";
    try {
      const named = model ? { model } : {};
      const instructed: Message[] = system.trim() ? [{ role: "system", content: system }] : [];
      const body = { ...named, messages: [...instructed, ...messages].map((one) => ({ ...one })), stream: true, temperature, max_tokens: most };
      const response = await fetched(path(job.id, "/v1/chat/completions"), { method: "POST", body, signal: stop.current.signal });
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Problem(500, String(chunk.error.message));
        whole += chunk.choices?.[0]?.delta?.content ?? "";
        setSaid([...messages, { role: "assistant", content: whole }]);
      }
    } catch (error) {
      if (!stop.current.signal.aborted) setProblem(error instanceof Problem ? error : new Problem(0, String(error)));
    }
    setBusy(false);
  };
  const send = (event: Event): void => {
    event.preventDefault();
    if (busy || !text.trim()) return;
    setText("");
    void answer([...said, { role: "user", content: text }]);
  };
  return (
    <section class="card chat">
      {job.state !== "running" && <p class="waits">The job is {job.state}: it answers once it runs.</p>}
      <label class="check">
        System prompt
        <input value={system} maxLength={20_000} placeholder="none" onInput={(event) => setSystem(event.currentTarget.value)} />
      </label>
      <div class="talk" aria-live="polite">
        {said.map((one, i) => (
          <p key={i} class={`message ${one.role}`}>
            <small>{one.role}</small>
            <span class="words">{one.content || (busy && i === said.length - 1 ? "…" : "")}</span>
          </p>
        ))}
      </div>
      <Said problem={problem} />
      <form onSubmit={send}>
        <textarea
          rows={2}
          aria-label="Message"
          placeholder="Message…  (Enter to send, Shift+Enter for a new line)"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey) send(event);
          }}
        />
        <div class="bar">
          {adapters.length > 0 && (
            <Select label="Model" value={model} of={[["", job.model], ...adapters.map((name) => [name, name] as const)]} choose={setModel} />
          )}
          <label class="check">
            temperature
            <input type="number" min="0" max="2" step="0.1" value={temperature} onInput={(event) => setTemperature(Number(event.currentTarget.value))} />
          </label>
          <label class="check">
            tokens
            <input type="number" min="1" step="1" value={most} onInput={(event) => setMost(Number(event.currentTarget.value))} />
          </label>
          <span class="spring" />
          {said.length > 0 && !busy && (
            <button type="button" onClick={() => setSaid([])}>
              New conversation
            </button>
          )}
          {busy ? (
            <button type="button" onClick={() => stop.current?.abort()}>
              Stop
            </button>
          ) : (
            <button type="submit">Send</button>
          )}
        </div>
      </form>
    </section>
  );
}
