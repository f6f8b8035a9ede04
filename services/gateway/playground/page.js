// The page: a conversation, or a text to go on with, and what is asked of the model.

import { Answer } from "./answer.js";
import { ApiFailure, asCurl, listModels, stream } from "./api.js";
import { element } from "./element.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS, WrongField, chatRequest, completionRequest, wantsJson } from "./request.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const prompt = $("prompt");
const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };
const SUGGESTIONS = {
  chat: ["Name the capital of France.", "Write a Python function that sorts a list.", "Explain how a hash table works."],
  completion: ["def read_config(path):\n    \"\"\"Read a configuration file.\n", "class Stack:\n    def push(self, item):\n", "The quick brown fox"],
};

let messages = []; // of the conversation so far
let running = null; // the AbortController of what is being answered

const mode = () => document.querySelector("input[name=mode]:checked").value;
const announce = (text) => ($("status").textContent = text);

// --- asking ---------------------------------------------------------------------------------------------------------

function show(node) {
  $("welcome").hidden = true;
  log.append(node);
  log.scrollTop = log.scrollHeight;
}

// Changes what is in the log. A reader at its end stays there; one who has scrolled up stays where they are.
function draw(change) {
  const following = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (following) log.scrollTop = log.scrollHeight;
}

function showUser(text) {
  const turn = element("article", "turn user");
  turn.setAttribute("aria-label", "You");
  turn.append(element("div", "words", text));
  show(turn);
}

async function submit(text) {
  const kind = mode();
  const next = [...messages, { role: "user", content: text }];
  const body = checked(() => (kind === "chat" ? chatRequest(next) : completionRequest(text)));
  if (!body) return;
  prompt.value = "";
  if (kind === "chat") {
    showUser(text);
    messages = next;
  }
  await run(kind, body, kind === "chat" ? "" : text);
}

async function run(kind, body, given) {
  const json = wantsJson();
  const answer = new Answer({ given, code: kind === "completion", json, announce, draw });
  show(answer.node);
  const controller = (running = new AbortController());
  setRunning(true);
  announce("Answering.");
  try {
    for await (const event of stream(PATHS[kind], body, $("key").value, controller.signal)) {
      draw(() => answer.take(event));
    }
    draw(() => answer.end((results) => returnResults(answer, results)));
  } catch (error) {
    draw(() => failed(answer, error, controller.signal.aborted));
  }
  if (running === controller) {
    running = null;
    setRunning(false);
    if (kind === "chat") remember(answer);
    if ($("model").options.length > 1) await loadModels(); // the answer may have put another model to sleep
  }
}

function failed(answer, error, aborted) {
  if (aborted) answer.stopped();
  else if (error instanceof ApiFailure) answer.fail(error.message, error.body);
  else answer.fail("The connection was lost", String(error));
}

// Answers are part of the conversation, questions without an answer are not.
function remember(answer) {
  if (answer.calls.length) messages.push({ role: "assistant", content: answer.text || null, tool_calls: answer.calls });
  else if (answer.text) messages.push({ role: "assistant", content: answer.text });
  else messages.pop();
}

async function returnResults(answer, results) {
  if (running || messages.at(-1)?.tool_calls !== answer.calls) return;
  results.forEach((content, index) => messages.push({ role: "tool", tool_call_id: answer.calls[index].id, content }));
  const body = checked(() => chatRequest(messages));
  if (body) await run("chat", body, "");
}

// Calls without results have no place in a conversation that goes on.
function forgetOpenCalls() {
  if (messages.at(-1)?.tool_calls) messages.push(...messages.at(-1).tool_calls.map(noResult));
}

const noResult = ({ id }) => ({ role: "tool", tool_call_id: id, content: "" });

// The request that `make` makes; a wrong field is shown instead.
function checked(make) {
  for (const id of ["tools", "schema"]) mark(id, "");
  try {
    return make();
  } catch (error) {
    if (!(error instanceof WrongField)) throw error;
    mark(error.id, error.message);
    openSettings(true);
    $(error.id).focus();
    return null;
  }
}

function mark(id, message) {
  $(id).setAttribute("aria-invalid", String(message !== ""));
  const place = $(`${id}-error`);
  if (place) place.textContent = message;
}

function setRunning(on) {
  const send = $("send");
  send.textContent = on ? "Stop" : "Send";
  send.classList.toggle("stop", on);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else if (prompt.value.trim()) {
    forgetOpenCalls();
    submit(prompt.value);
  }
});

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
  if (mode() === "completion" && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  if (!running) $("composer").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if ($("settings").classList.contains("open")) openSettings(false);
  else running?.abort();
});

// --- settings -------------------------------------------------------------------------------------------------------

// An adapter is a model that stands after all bases, with the name of its own. A model whose workers sleep says so.
function modelOptions(models) {
  const bases = models.filter(({ parent }) => !parent);
  const adapters = models.filter(({ parent }) => parent);
  return [...bases, ...adapters].map(({ id, parent, phase }) => {
    const facts = [...(parent ? [`adapter of ${parent}`] : []), ...(phase === "sleeping" ? ["sleeps"] : [])];
    const option = element("option", "", facts.length ? `${id} (${facts.join(", ")})` : id);
    if (facts.length) option.value = id;
    return option;
  });
}

async function loadModels() {
  const select = $("model");
  const chosen = select.value;
  const key = $("key").value;
  try {
    const models = await listModels(key);
    if (key !== $("key").value) return; // it was asked again meanwhile
    select.replaceChildren(...modelOptions(models));
    if (models.some(({ id }) => id === chosen)) select.value = chosen;
    select.title = models.length ? "" : "No model is served yet";
    $("model-error")?.remove();
  } catch (error) {
    if (!(error instanceof ApiFailure)) throw error;
    if (key !== $("key").value) return;
    select.replaceChildren(element("option", "", "no models"));
    select.firstChild.value = "";
    showModelError(error);
  }
}

function showModelError(error) {
  $("model-error")?.remove();
  const answer = new Answer({ announce, draw });
  answer.fail(error.message, error.body);
  answer.node.id = "model-error";
  answer.words.node.remove();
  log.append(answer.node);
}

function openSettings(open) {
  $("settings").classList.toggle("open", open);
  $("open").setAttribute("aria-expanded", String(open));
}

$("open").addEventListener("click", () => openSettings(!$("settings").classList.contains("open")));
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  loadModels();
});
$("tools-example").addEventListener("click", () => {
  $("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 1);
  mark("tools", "");
});
$("schema-example").addEventListener("click", () => {
  $("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 1);
  mark("schema", "");
});
$("curl").addEventListener("click", async () => {
  const text = prompt.value;
  const next = text ? [...messages, { role: "user", content: text }] : messages;
  const body = checked(() => (mode() === "chat" ? chatRequest(next) : completionRequest(text)));
  if (!body) return;
  await navigator.clipboard.writeText(asCurl(PATHS[mode()], body));
  announce("Copied.");
  $("curl").textContent = "Copied";
  setTimeout(() => ($("curl").textContent = "Copy the request as curl"), 1500);
});

const THEMES = { "": "as the system's", light: "light", dark: "dark" };
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
  $("theme").title = `Colours: ${THEMES[theme]}`;
}
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const theme = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  localStorage.setItem("theme", theme);
  setTheme(theme);
});

// --- beginning ------------------------------------------------------------------------------------------------------

function startAnew() {
  running?.abort();
  running = null;
  setRunning(false);
  messages = [];
  log.replaceChildren($("welcome"));
  $("welcome").hidden = false;
  prompt.focus();
}

function setMode() {
  const kind = mode();
  document.body.classList.toggle("completing", kind === "completion");
  for (const part of document.querySelectorAll("[data-mode]")) part.hidden = part.dataset.mode !== kind;
  prompt.placeholder = kind === "chat" ? "Message" : "Text to go on with";
  $("keys").textContent =
    kind === "chat" ? "Enter sends, Shift+Enter begins a line, Esc stops." : "Ctrl+Enter sends, Esc stops.";
  $("suggestions").replaceChildren(
    ...SUGGESTIONS[kind].map((text) => {
      const item = element("li");
      const button = element("button", kind === "chat" ? "" : "code", text.trim().split("\n")[0]);
      button.type = "button";
      button.addEventListener("click", () => submit(text));
      item.append(button);
      return item;
    }),
  );
  startAnew();
}

$("new").addEventListener("click", startAnew);
for (const input of document.querySelectorAll("input[name=mode]")) input.addEventListener("change", setMode);
setTheme(localStorage.getItem("theme") ?? "");
$("key").value = sessionStorage.getItem("key") ?? "";
setMode();
loadModels();
