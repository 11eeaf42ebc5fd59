// Helpers that every part of the page shares, so that all show things in the same way.

export const byId = (id) => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const numbers = new Intl.NumberFormat("en");
export const count = (n) => numbers.format(n);

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return `${bytes < 10 && unit ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

export function time(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s`;
}

/** The cost of a prompt in tokens: reused, known but computed again, and new. */
export function costOf(of) {
  const again = of.replayed_tokens ?? 0;
  return { reused: of.cached_tokens, again, fresh: Math.max(of.prefilled_tokens - again, 0) };
}

export function bar({ reused, again, fresh }) {
  const parts = [["reused", reused], ["again", again], ["new", fresh]];
  const label = `${count(reused)} tokens reused, ${count(again)} computed again, ${count(fresh)} new`;
  const element = make("div", { class: "bar", role: "img", "aria-label": label, title: label });
  for (const [name, tokens] of parts) {
    if (!tokens) continue;
    const part = make("i", { class: name });
    part.style.flexGrow = tokens;
    element.append(part);
  }
  return element;
}

const WHY = {
  cold: () => "nothing like it was here",
  diverged: (m) => `new from ${m.role ? `the ${m.role} message` : `token ${count(m.shared ?? 0)}`} on`,
  no_checkpoint: (m) => `known to token ${count(m.shared ?? 0)}, last checkpoint at ${count(m.resume ?? 0)}`,
  evicted: (m) => (m.held ? `${count(m.held)} tokens of it had to go` : "what was there had to go"),
  salt: () => "held for another salt only",
  other_model: () => "held for another model only",
  exact_mode: () => "exact mode reuses whole chunks",
  disabled: () => "reuse is off for this model",
  failed: () => "what was there could not be restored",
};

/** The reason why no more was reused, in a few words. Requests of others have only its name. */
export function why(miss) {
  if (!miss) return "";
  const told = typeof miss === "string" ? { reason: miss } : miss;
  const own = told.shared !== undefined || told.reason === "cold";
  const words = own ? WHY[told.reason]?.(told) : null;
  return words ?? String(told.reason ?? "").replaceAll("_", " ");
}

/** The same reason at length, with the words of both prompts where they differ. */
export function whyAtLength(miss) {
  if (!miss?.text) return null;
  const sides = miss.stored || miss.sent ? `\n\nheld: ${miss.stored}\nsent: ${miss.sent}` : "";
  return miss.text + sides;
}
