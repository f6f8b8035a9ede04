// One answer on the page: it grows with the stream's events.

import { element } from "./element.js";
import { MarkdownWords, PlainWords } from "./words.js";

// Causes of a worker's loss, in the words of the page.
const LOST = {
  connection_lost: "was lost",
  stall: "did not answer any more",
  ranks_lost: "lost its ranks",
  drain: "is shutting down",
  overload: "gave the request away",
  loading: "was not ready",
  connect: "could not be reached",
};

export class Answer {
  text = "";
  reasoning = "";
  calls = []; // as messages hold them
  finish = null;
  #worker = null;
  #usage = null;
  #began = performance.now();
  #first = 0;
  #last = 0;
  #silence = 0;

  // `given` is the text that the answer continues. `draw` makes a change of the page.
  constructor({ given = "", code = false, json = false, announce, draw }) {
    this.json = json;
    this.announce = announce;
    this.node = element("article", "turn assistant running");
    this.node.setAttribute("aria-label", "Answer");
    this.words = code || json ? new PlainWords({ given, code: true }) : new MarkdownWords(draw);
    this.notes = element("div", "notes");
    this.extras = element("div", "extras");
    this.facts = element("ul", "facts");
    this.node.append(this.words.node, this.extras, this.notes, this.facts);
    this.#watchSilence();
    this.#showFacts();
  }

  // An event of the stream.
  take(event) {
    const [choice] = event.choices;
    if (choice?.worker) this.#takeOver(choice.worker, this.#usage?.completion_tokens ?? 0);
    this.#usage = event.usage ?? this.#usage;
    if (choice) this.#takeChoice(choice);
    this.#showFacts();
  }

  #takeChoice(choice) {
    const delta = choice.delta ?? { content: choice.text };
    if (delta.reasoning_content) this.#think(delta.reasoning_content);
    if (delta.content) this.#write(delta.content);
    for (const call of delta.tool_calls ?? []) this.#call(call);
    this.finish = choice.finish_reason ?? this.finish;
    const now = performance.now();
    if (!this.#first && this.#usage?.completion_tokens) this.#first = now;
    this.#last = now;
    this.#watchSilence();
  }

  #write(text) {
    this.text += text;
    this.words.write(text);
  }

  // Another worker has the request: the first one, or one that goes on after `tokens`.
  #takeOver({ id, after, resume }, tokens) {
    if (this.#worker !== null) {
      this.words.seam(`${id} goes on from here`);
      const how = resume === "approximate" ? "; words from here on may differ" : ", token for token";
      const note = `${this.#worker} ${LOST[after] ?? after} after ${tokens} tokens. ${id} goes on${how}.`;
      const line = element("p", "takeover", note);
      line.dataset.cause = after;
      this.notes.append(line);
      this.announce(note);
    }
    this.#worker = id;
  }

  #think(text) {
    if (!this.thinking) {
      const details = element("details", "thinking");
      details.open = true;
      this.thinking = element("div", "words");
      details.append(element("summary", "", "Reasoning"), this.thinking);
      this.node.prepend(details);
    }
    this.reasoning += text;
    this.thinking.append(text);
  }

  #call({ index, id, function: part }) {
    const call = (this.calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id = id ?? call.id;
    call.function.name += part.name ?? "";
    call.function.arguments += part.arguments ?? "";
    let card = this.extras.children[index];
    if (!card) {
      card = element("section", "card call");
      card.append(element("h3"), element("pre"));
      this.extras.append(card);
    }
    card.children[0].textContent = call.function.name;
    card.children[1].textContent = call.function.arguments;
  }

  // The last event is there. `results` is called with the texts that the calls gave, in their order.
  end(results) {
    this.#stop();
    const forms = this.calls.map((call, index) => this.#resultForm(call, this.extras.children[index]));
    for (const form of forms) {
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        form.classList.add("given");
        if (!forms.every((other) => other.classList.contains("given"))) return;
        for (const control of forms.flatMap((other) => [...other.elements])) control.disabled = true;
        results(forms.map((other) => other.elements[0].value));
      });
    }
    const asked = this.calls.map((call) => call.function.name).join(", ");
    const tokens = this.#usage?.completion_tokens ?? 0;
    this.announce(asked ? `The model calls ${asked}: type what it returns.` : `Answer complete, ${tokens} tokens.`);
  }

  #resultForm(call, card) {
    const form = element("form");
    const label = element("label", "", `What ${call.function.name} returns`);
    label.append(element("textarea", "code"));
    label.lastChild.rows = 1;
    form.append(label, element("button", "", "Return"));
    card.append(form);
    return form;
  }

  // It has failed, or was stopped by the user.
  fail(title, body) {
    this.#stop();
    const card = element("section", "card error");
    card.setAttribute("role", "alert");
    card.append(element("h3", "", title), element("pre", "", pretty(body)));
    this.node.insertBefore(card, this.facts);
    this.announce(""); // the alert speaks for itself
  }

  stopped() {
    this.finish = "stopped";
    this.#stop();
    this.announce("Stopped.");
  }

  #stop() {
    clearTimeout(this.#silence);
    this.words.finish();
    this.node.classList.remove("running");
    this.#showFacts();
  }

  // A pause is seen before another worker has been found.
  #watchSilence() {
    clearTimeout(this.#silence);
    this.quiet = false;
    this.#silence = setTimeout(() => {
      this.quiet = true;
      this.#showFacts();
    }, 1000);
  }

  #showFacts() {
    const { completion_tokens: tokens = 0, prompt_tokens: prompt } = this.#usage ?? {};
    const running = this.node.classList.contains("running");
    const facts = [this.#worker ?? (running ? "waiting for a worker" : "")];
    if (this.#first) facts.push(`first token ${duration(this.#first - this.#began)}`);
    if (this.#last > this.#first && tokens > 1) {
      facts.push(`${((1000 * (tokens - 1)) / (this.#last - this.#first)).toFixed(0)} tokens/s`);
    }
    if (tokens) facts.push(`${prompt} + ${tokens} tokens`);
    if (running && this.quiet && this.#worker) facts.push("waiting for the next token");
    if (this.finish) facts.push(this.finish);
    const items = facts.filter(Boolean).map((fact) => element("li", "", fact));
    if (this.json && this.finish && !this.calls.length) {
      items.push(isJson(this.text) ? element("li", "good", "valid JSON") : element("li", "bad", "JSON cut off"));
    }
    this.facts.replaceChildren(...items);
  }
}

function duration(ms) {
  return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

function pretty(body) {
  try {
    return JSON.stringify(JSON.parse(body), null, 2);
  } catch {
    return body;
  }
}
