// The chat: a tree of messages, so that an edited turn is another branch and nothing is lost.

import { stream } from "./api.js";
import { bar, byId, costOf, count, make, time, why, whyAtLength } from "./show.js";

const MOST_TOKENS = 1024;

export const EXAMPLES = {
  system: `You are the keeper of a small harbour. Answer from this table.
harbour master: Ingrid
high tide: 14:20
low tide: 20:35
blue boat: Ottilie
red boat: Marten
mackerel price: 34
ferry gate: B7
lighthouse key: 4711
crane: broken
net store: open`,
  questions: [
    ["Look up a line", "What is the high tide?"],
    ["Tell it something", "Please remember that my cabin is 12."],
    ["Do a sum", "What is 34 + 58?"],
  ],
};

class Message {
  constructor(role, text, parent) {
    Object.assign(this, { role, text, parent, thinking: "", children: [], chosen: 0 });
    parent?.children.push(this);
    if (parent) parent.chosen = parent.children.length - 1;
  }
}

export class Chat {
  constructor(onDone) {
    this.onDone = onDone;
    this.root = new Message("root", "", null);
    this.running = null;
    this.element = byId("turns");
    this.system = byId("system-text");
    this.system.value = EXAMPLES.system;
    this.question = byId("question");
    this._wire();
    this.show();
  }

  /** The messages of the branch that is shown. */
  path() {
    const found = [];
    for (let at = this.root.children[this.root.chosen]; at; at = at.children[at.chosen]) found.push(at);
    return found;
  }

  ask(text, parent = this.path().at(-1) ?? this.root) {
    if (this.running || !text.trim()) return;
    this._answer(new Message("user", text.trim(), parent));
  }

  async _answer(user) {
    const answer = new Message("assistant", "", user);
    const stopper = new AbortController();
    this.running = stopper;
    answer.state = "waiting";
    this.show();
    this._scroll(true);
    const body = { messages: this._messages(user), max_tokens: MOST_TOKENS };
    try {
      for await (const chunk of stream(body, stopper.signal)) this._take(answer, chunk);
      answer.state = "done";
    } catch (problem) {
      answer.state = stopper.signal.aborted ? "stopped" : "failed";
      if (!stopper.signal.aborted) answer.problem = problem.message;
    }
    this.running = null;
    this.show();
    this._scroll();
    this.onDone(answer);
  }

  _take(answer, chunk) {
    if (chunk.progress) answer.progress = chunk.progress;
    if (chunk.rewarm) answer.cost = { ...chunk.rewarm, prompt: chunk.usage?.prompt_tokens };
    const delta = chunk.choices?.[0]?.delta ?? {};
    answer.thinking += delta.reasoning_content ?? "";
    answer.text += delta.content ?? "";
    if (delta.reasoning_content || delta.content) answer.state = "writing";
    if (chunk.choices?.[0]?.finish_reason === "length") answer.cut = true;
    this._update(answer);
    this._scroll();
  }

  /** The messages to send: the whole conversation, as every client sends it. */
  _messages(last) {
    const sent = [];
    for (let at = last; at.parent; at = at.parent) {
      const message = { role: at.role, content: at.text };
      if (at.thinking) message.reasoning_content = at.thinking;
      sent.unshift(message);
    }
    const system = this.system.value.trim();
    return system ? [{ role: "system", content: system }, ...sent] : sent;
  }

  _wire() {
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) return;
      this.ask(this.question.value);
      this.question.value = "";
      this._grow();
    });
    this.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    this.question.addEventListener("input", () => this._grow());
    this.system.addEventListener("input", () => this._summary());
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("fresh").addEventListener("click", () => {
      this.running?.abort();
      this.root = new Message("root", "", null);
      this.show();
      this.question.focus();
    });
    for (const [name, question] of EXAMPLES.questions) {
      const chip = make("button", { type: "button", class: "chip", title: name }, question);
      chip.addEventListener("click", () => this.ask(question));
      byId("examples").append(chip);
    }
  }

  _grow() {
    this.question.style.height = "auto";
    this.question.style.height = `${this.question.scrollHeight + 2}px`;
  }

  _summary() {
    const text = this.system.value.trim();
    byId("system-words").textContent = text ? `· ${text.split("\n")[0]}` : "· none";
  }

  show() {
    const path = this.path();
    this._summary();
    byId("welcome").hidden = path.length > 0;
    byId("send").hidden = this.running !== null;
    byId("stop").hidden = this.running === null;
    this.element.replaceChildren(...path.map((message) => this._turn(message)));
  }

  _turn(message) {
    const item = make("li", { class: `turn ${message.role}` });
    message.element = item;
    if (message.role === "user") {
      item.append(make("div", { class: "text" }, message.text), this._tools(message));
      return item;
    }
    message.parts = {
      thinking: make("div", { class: "text" }),
      summary: make("summary"),
      text: make("div", { class: "text" }),
      problem: make("p", { class: "problem", role: "alert" }),
      cost: make("div", { class: "cost" }),
    };
    const { thinking, summary, text, problem, cost } = message.parts;
    message.parts.fold = make("details", {}, summary, thinking);
    item.append(message.parts.fold, text, problem, cost, this._tools(message));
    this._update(message);
    return item;
  }

  _update(message) {
    const parts = message.parts;
    parts.fold.hidden = !message.thinking;
    parts.thinking.textContent = message.thinking.trim();
    parts.summary.textContent = message.text || message.state !== "writing" ? "Thought" : "Thinking …";
    parts.text.textContent = message.text + (message.cut ? " …" : "");
    parts.problem.textContent = message.problem ?? (message.state === "stopped" ? "Stopped." : "");
    parts.problem.hidden = !parts.problem.textContent;
    parts.cost.replaceChildren(...this._cost(message));
  }

  _cost(message) {
    if (message.cost?.timings) {
      const parts = costOf(message.cost);
      const said = [`${count(parts.reused)} reused`];
      if (parts.again) said.push(`${count(parts.again)} again`);
      said.push(`${count(parts.fresh)} new`, `first token ${time(message.cost.timings.ttft_ms)}`);
      const reason = why(message.cost.miss);
      return [bar(parts), make("span", { class: "soft", title: whyAtLength(message.cost.miss) }, said.join(" · "), reason ? ` · ${reason}` : "")];
    }
    if (message.state === "waiting" && message.progress) {
      const [done, total] = message.progress;
      return [make("span", { class: "soft" }, `reading ${count(done)} of ${count(total)} tokens …`)];
    }
    return message.state === "waiting" ? [make("span", { class: "soft" }, "…")] : [];
  }

  _tools(message) {
    const tools = make("div", { class: "tools" });
    const siblings = message.parent.children;
    if (siblings.length > 1) {
      const at = siblings.indexOf(message);
      const turn = (by, label, text) => make("button", {
        type: "button", "aria-label": label, disabled: siblings[at + by] ? null : "",
        onclick: () => this._choose(message.parent, at + by),
      }, text);
      tools.append(
        turn(-1, "The branch before", "‹"),
        make("span", { class: "soft" }, `${at + 1} of ${siblings.length}`),
        turn(1, "The branch after", "›"),
      );
    }
    const button = (text, label, onclick) =>
      tools.append(make("button", { type: "button", "aria-label": label, onclick }, text));
    if (message.role === "user") button("Edit", "Edit this message: the chat forks here", () => this._edit(message));
    else if (message.state !== "waiting" && message.state !== "writing") {
      button("Again", "Have this answered again", () => !this.running && this._answer(message.parent));
    }
    return tools;
  }

  _choose(parent, index) {
    if (this.running) return;
    parent.chosen = index;
    this.show();
  }

  _edit(message) {
    if (this.running) return;
    const field = make("textarea", { rows: "3", "aria-label": "Edited message" });
    field.value = message.text;
    const done = make("div", { class: "row end" },
      make("button", { type: "button", class: "quiet", onclick: () => this.show() }, "Cancel"),
      make("button", { type: "button", onclick: () => this.ask(field.value, message.parent) }, "Send as a fork"),
    );
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.show();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.ask(field.value, message.parent);
      }
    });
    message.element.classList.add("editing");
    message.element.replaceChildren(field, done);
    field.focus();
  }

  /** Follows the answer, unless the reader has scrolled up. */
  _scroll(always = false) {
    const box = byId("scroll");
    const below = box.scrollHeight - box.scrollTop - box.clientHeight;
    if (always || below < 120) box.scrollTop = box.scrollHeight;
  }
}
