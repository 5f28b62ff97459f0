// Draws the phone's state and changes it by taps and typing. No clock, no network, no randomness: the same state and the
// same taps always give the same next state.
"use strict";

let state;
const find = (id) => document.getElementById(id);
const top_ = () => state.view.stack[state.view.stack.length - 1];
const say = (text) => { state.view.notice = text; };
const COLOURS = { Contacts: "#0b57d0", Messages: "#1a9850", Settings: "#5f6368", Clock: "#b3261e", Notes: "#b06000" };

// --- what is drawn ------------------------------------------------------------------------------------------------

function node(tag, about, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (name === "tap") made.dataset.tap = JSON.stringify(value);
    else if (name === "name") made.setAttribute("aria-label", value);
    else if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...inside.filter((one) => one !== null));
  return made;
}
const text = (words, kind = "p", css = "") => node(kind, { "data-text": "", class: css }, words);
const button = (words, tap, css = "strong") => node("button", { tap, class: css }, words);
const row = (words, tap, small = "") =>
  node("button", { tap, class: "row", name: small ? `${words}, ${small}` : words }, words, node("small", {}, small));
const toggle = (words, tap, on) =>
  node("button", { tap, class: on ? "row on" : "row", name: words, role: "switch", "aria-checked": String(on) },
    words, node("div", { class: "switch" }));

function field(name, label, tag = "input") {
  const made = node(tag, { name: label, placeholder: label, "data-field": name, autocomplete: "off", spellcheck: "false" });
  made.value = top_().fields[name] ?? "";
  return made;
}

function level(words, key) {
  const value = state.data.settings[key];
  return node("div", { class: "row" }, text(`${words}: ${value}`, "span"), node("span", {},
    node("button", { tap: ["step", key, -1], name: `${words} down` }, "−"),
    node("button", { tap: ["step", key, 1], name: `${words} up` }, "+")));
}

const of = (list, name) => list.find((one) => one.name === name);
const SWITCHES = [["Wi-Fi", "wifi"], ["Bluetooth", "bluetooth"], ["Airplane mode", "airplane"], ["Location", "location"],
  ["Battery saver", "saver"], ["Auto-rotate", "rotate"], ["Notifications", "notifications"], ["Mobile data", "mobile"],
  ["Hotspot", "hotspot"], ["Dark theme", "dark"], ["Vibration", "vibration"], ["Screen lock", "lock"]];

const SCREENS = {
  home: () => [node("div", { id: "apps" }, ...state.data.apps.map((app) =>
    node("button", { tap: ["open", app], style: `background:${COLOURS[app]}` }, app)))],
  Contacts: () => [text("Contacts", "h1"), button("New contact", ["push", "edit", ""]),
    ...state.data.contacts.map((one) => row(one.name, ["push", "contact", one.name], one.favourite ? "favourite" : ""))],
  contact: (name) => {
    const one = of(state.data.contacts, name);
    return [text(one.name, "h1"), text(`Number: ${one.number}`), toggle("Favourite", ["favourite", name], one.favourite),
      button("Edit", ["edit", name]), button("Message", ["thread", name]), button("Delete", ["delete_contact", name])];
  },
  edit: (name) => [text(name ? "Edit contact" : "New contact", "h1"), field("name", "Name"), field("number", "Number"),
    button("Save", ["save_contact", name])],
  Messages: () => [text("Messages", "h1"), button("New message", ["push", "compose"]),
    ...state.data.threads.map((one) => row(one.name, ["push", "thread", one.name], "open"))],
  thread: (name) => [text(name, "h1"),
    ...(of(state.data.threads, name)?.lines ?? []).map((one) => text(one.text, "p", one.me ? "me" : "")),
    field("text", "Message"), button("Send", ["send", name])],
  compose: () => [text("New message", "h1"), field("to", "To"), button("Next", ["compose"])],
  Settings: () => [text("Settings", "h1"),
    ...SWITCHES.map(([words, key]) => toggle(words, ["toggle", key], state.data.settings[key])),
    level("Volume", "volume"), level("Brightness", "brightness")],
  Clock: () => [text("Alarms", "h1"), button("New alarm", ["push", "alarm"]),
    ...state.data.alarms.map((one, at) => toggle(one.time, ["switch_alarm", at], one.on))],
  alarm: () => [text("New alarm", "h1"), field("time", "Time, as 07:30"), button("Save", ["save_alarm"])],
  Notes: () => [text("Notes", "h1"), button("New note", ["note", -1]),
    ...state.data.notes.map((one, at) => row(one.title, ["note", at]))],
  note: (at) => [text(at < 0 ? "New note" : "Note", "h1"), field("title", "Title"), field("text", "Text", "textarea"),
    button("Save", ["save_note", at]), at < 0 ? null : button("Delete", ["delete_note", at])],
};

function draw() {
  const { at, scroll } = top_();
  document.body.className = state.data.settings.dark ? "dark" : "";
  find("time").textContent = "09:00";
  find("marks").textContent = [["wifi", "Wi-Fi"], ["bluetooth", "BT"], ["airplane", "Airplane"]]
    .filter(([key]) => state.data.settings[key]).map(([, words]) => words).join(" ");
  const main = find("main");
  main.replaceChildren(...(state.view.notice ? [text(state.view.notice)] : []), ...SCREENS[at[0]](...at.slice(1)).filter(Boolean));
  document.querySelector("nav").replaceChildren(
    node("button", { tap: ["back"], name: "Back" }, "◁"), node("button", { tap: ["home"], name: "Home" }, "○"));
  main.scrollTop = scroll;
  const focused = [...main.querySelectorAll("[data-field]")].find((one) => one.dataset.field === state.view.focus);
  if (focused) {
    focused.focus({ preventScroll: true });
    focused.setSelectionRange(focused.value.length, focused.value.length);
  } else document.activeElement?.blur();
}

// --- what changes it ----------------------------------------------------------------------------------------------

const push = (...at) => state.view.stack.push({ at, scroll: 0, fields: {} });
const pop = () => { if (state.view.stack.length > 1) state.view.stack.pop(); };
const home = () => { state.view.stack.length = 1; };

const TAPS = {
  push, back: pop, home,
  open: (app) => { home(); push(app); },
  toggle: (key) => { state.data.settings[key] = !state.data.settings[key]; },
  step: (key, by) => { state.data.settings[key] = Math.min(10, Math.max(0, state.data.settings[key] + by)); },
  favourite: (name) => { const one = of(state.data.contacts, name); one.favourite = !one.favourite; },
  edit: (name) => { push("edit", name); Object.assign(top_().fields, { name, number: of(state.data.contacts, name).number }); },
  thread: (name) => push("thread", name),
  delete_contact: (name) => { state.data.contacts = state.data.contacts.filter((one) => one.name !== name); pop(); },
  save_contact: (old) => {
    const name = (top_().fields.name ?? "").trim(), number = (top_().fields.number ?? "").trim();
    if (!name || !number) return say("Name and number are needed.");
    if (name !== old && of(state.data.contacts, name)) return say("There is a contact of this name.");
    const one = of(state.data.contacts, old) ?? { favourite: false };
    if (!old) state.data.contacts.push(one);
    Object.assign(one, { name, number });
    state.data.contacts.sort((a, b) => (a.name < b.name ? -1 : 1));
    pop();
    if (old) top_().at = ["contact", name];
  },
  send: (name) => {
    const words = (top_().fields.text ?? "").trim();
    if (!words) return say("The message is empty.");
    if (!of(state.data.threads, name)) state.data.threads.push({ name, lines: [] });
    of(state.data.threads, name).lines.push({ me: true, text: words });
    top_().fields = {};
  },
  compose: () => {
    const name = (top_().fields.to ?? "").trim();
    if (!of(state.data.contacts, name)) return say("There is no contact of this name.");
    pop();
    push("thread", name);
  },
  save_alarm: () => {
    const time = (top_().fields.time ?? "").trim();
    if (!/^([01]\d|2[0-3]):[0-5]\d$/.test(time)) return say("A time is written as 07:30.");
    state.data.alarms.push({ time, on: true });
    state.data.alarms.sort((a, b) => (a.time < b.time ? -1 : 1));
    pop();
  },
  switch_alarm: (at) => { state.data.alarms[at].on = !state.data.alarms[at].on; },
  note: (at) => { push("note", at); if (at >= 0) Object.assign(top_().fields, state.data.notes[at]); },
  save_note: (at) => {
    const title = (top_().fields.title ?? "").trim(), words = (top_().fields.text ?? "").trim();
    if (!title) return say("A title is needed.");
    if (at < 0) state.data.notes.push({ title, text: words });
    else state.data.notes[at] = { title, text: words };
    pop();
  },
  delete_note: (at) => { state.data.notes.splice(at, 1); pop(); },
};

function tap(name, ...rest) {
  state.view.notice = state.view.focus = "";
  TAPS[name](...rest);
  draw();
}

document.addEventListener("click", (event) => {
  const hit = event.target.closest("[data-tap],[data-field]");
  if (hit?.dataset.tap) tap(...JSON.parse(hit.dataset.tap));
  else { state.view.focus = hit?.dataset.field ?? ""; draw(); }
});
document.addEventListener("input", (event) => { top_().fields[event.target.dataset.field] = event.target.value; });
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !state.view.focus || event.target.tagName === "TEXTAREA") return;
  event.preventDefault();
  state.view.focus = "";
  draw();
});

// --- what the environment asks for ----------------------------------------------------------------------------------

function element(one) {
  const place = one.getBoundingClientRect();
  const x = place.left + place.width / 2, y = place.top + place.height / 2;
  const hit = document.elementFromPoint(x, y);
  if (!hit || !(hit === one || one.contains(hit))) return null;
  const about = { box: [place.left, place.top, place.right, place.bottom].map(Math.round) };
  if (one.dataset.field) return { ...about, kind: "field", text: one.placeholder, value: one.value, focused: one.dataset.field === state.view.focus };
  if (one.getAttribute("role") === "switch") return { ...about, kind: "switch", text: one.getAttribute("aria-label"), checked: one.classList.contains("on") };
  return { ...about, kind: one.dataset.tap ? "button" : "text", text: one.getAttribute("aria-label") ?? one.textContent };
}

window.phone = {
  load(given) { state = given; draw(); },
  save() { return state; },
  look() {
    const found = document.querySelectorAll("#main [data-tap], #main [data-field], #main [data-text], nav [data-tap]");
    return [...found].map(element).filter(Boolean);
  },
  scroll(direction) {
    const main = find("main");
    main.scrollTop += ({ down: 0.8, up: -0.8 }[direction] ?? 0) * main.clientHeight;
    top_().scroll = main.scrollTop;
  },
  clear() { document.activeElement?.select?.(); },
  tap,
};
