// The tree as an icicle chart that lies on its side. The tokens of prompts go from left to right,
// and a span is as wide as its tokens. It is as high as all the spans that follow it.

import { get } from "./api.js";
import { byId, count, draw, size } from "./show.js";

const MOST = 250;
const ROW = 34;
const HIGHEST = 380;
const AXIS = 18;
const GAP = 1.5;
const MERGED = 14;
const HINT = "Point at a span, or use the arrow keys, to see which message it is.";

export class Tree {
  constructor() {
    this.element = byId("tree");
    this.detail = byId("tree-detail");
    this.root = null;
    this.tag = null;
    this.here = null;
    this.places = [];
    this.reused = null;
    this.element.addEventListener("keydown", (event) => this._key(event));
    this.element.addEventListener("focus", () => this._move(this.here ?? this.places[0]?.id));
    this.element.addEventListener("pointerleave", () => this._tell(null));
    byId("tree-up").addEventListener("click", () => this.enter(null));
    new ResizeObserver(() => this.body && this._draw()).observe(this.element);
  }

  /** Gets the tree and draws it. `reused`: the tokens that the last request did not compute. */
  async refresh(reused) {
    if (reused !== undefined) this.reused = reused;
    const asked = this.root;
    const path = `/v1/cache?limit=${MOST}${asked ? `&root=${asked}` : ""}`;
    let reply;
    try {
      reply = await get(path, { tag: this.tag });
    } catch (problem) {
      if (problem.status === 404 && asked) return this.enter(null);
      throw problem;
    }
    if (asked !== this.root) return undefined;
    if (reply) {
      this.tag = reply.tag;
      this.body = reply.body;
      this._plan();
    }
    if (reply || reused !== undefined) this._draw();
    return reply?.body;
  }

  enter(id) {
    this.root = id;
    this.tag = null;
    this.here = null;
    byId("tree-up").hidden = id === null;
    return this.refresh();
  }

  /** Puts each node below its parent. Namespaces have no tokens, and serve only to separate their
   * spans. */
  _plan() {
    const { tree } = this.body;
    const known = new Map([[tree.root.id, { ...tree.root, children: [] }]]);
    const mine = new Map([[tree.root.id, this.root !== null && tree.nodes.some((n) => n.label)]]);
    for (const node of tree.nodes) {
      const place = { ...node, children: [] };
      known.set(node.id, place);
      mine.set(node.id, node.yours ?? mine.get(node.parent));
      place.mine = mine.get(node.id);
      known.get(node.parent).children.push(place);
    }
    for (const rest of tree.merged) {
      const parent = known.get(rest.parent);
      parent.children.push({
        ...rest, id: `${rest.parent}+`, merged: rest.count, start: parent.start + parent.tokens,
        mine: parent.mine, children: [], run: 0, endsRun: true,
      });
    }
    for (const place of known.values()) place.run = runOf(place);
    this.top = known.get(tree.root.id);
    const used = tree.nodes.filter((n) => n.used_last).map((n) => n.last_used);
    const newest = tree.nodes.filter((n) => n.tokens).map((n) => n.last_used);
    // Where nothing was reused, all spans of the newest request are new.
    this.since = used.length ? Math.max(...used) : Math.max(1, ...newest);
  }

  _draw() {
    const { tree } = this.body;
    const all = this.body;
    byId("tree-sum").textContent = `${count(all.tokens)} tokens in ${count(all.entries)} spans, `
      + `${count(all.checkpoints)} checkpoints`;
    const width = this.element.clientWidth;
    const leaves = leavesOf(this.top);
    const start = this.root === null ? 0 : tree.root.start;
    const end = Math.max(start + 1, ...reach(this.top));
    const height = Math.min(HIGHEST, Math.max(leaves * ROW, ROW));
    const scale = (width - 8) / (end - start);
    const svg = draw("svg", {
      viewBox: `0 0 ${width} ${height + AXIS}`, width, height: height + AXIS, "aria-hidden": "false",
    });
    this.places = [];
    if (this.top.children.length) this._axis(svg, start, end, scale, height);
    this.over = [];
    const roots = this.root === null ? this.top.children : [this.top];
    let y = 0;
    for (const place of roots) {
      const share = (height * leavesOf(place)) / leaves;
      this._span(svg, place, null, { x: (at) => (at - start) * scale, y, height: share, level: 1 });
      y += share;
    }
    svg.append(...this.over);
    if (!this.places.length) svg.append(draw("text", { class: "none", x: 0, y: 22 }, "Nothing yet: ask something."));
    this.element.replaceChildren(svg);
    if (this.here && !this.places.some((p) => p.id === this.here)) this.here = null;
    this._mark();
    if (!this.told) this._tell(null);
  }

  _axis(svg, start, end, scale, height) {
    const step = niceStep((end - start) / 6);
    for (let at = Math.ceil(start / step) * step; at <= end; at += step) {
      const x = (at - start) * scale;
      if (x > (end - start) * scale - 20 && at !== start) break;
      svg.append(draw("line", { class: "tick", x1: x, x2: x, y1: 0, y2: height + 4 }));
      svg.append(draw("text", { class: "axis", x: x + (x ? 3 : 0), y: height + 14 }, at === start ? `token ${count(at)}` : count(at)));
    }
  }

  _span(svg, place, parent, box) {
    const left = box.x(place.start);
    const wide = place.merged ? MERGED : box.x(place.start + place.tokens) - left;
    if (place.tokens && wide > 0) this._body(svg, place, parent, box, left, wide);
    const leaves = leavesOf(place);
    let y = box.y;
    const above = place.tokens ? place : parent;
    for (const child of place.children) {
      const share = (box.height * leavesOf(child)) / leaves;
      this._span(svg, child, above, { ...box, y, height: share, level: box.level + (place.tokens ? 1 : 0) });
      y += share;
    }
  }

  _body(svg, place, parent, box, left, wide) {
    const tall = Math.max(box.height - GAP, 0.7);
    // A message that is stored in several spans is drawn as one block, with its words over it.
    const goesOn = !place.endsRun;
    const across = Math.max(wide - (goesOn ? 0 : GAP), 1);
    const room = (box.x(place.start + place.run) - left) - GAP;
    const tiers = Object.keys(place.bytes);
    const lit = this._lit(place);
    const fresh = !lit && place.mine && !place.merged && place.last_used >= this.since && !place.hits;
    const deep = place.merged || place.children.length;
    const kinds = [
      "span", place.merged && "merged", tiers.includes("disk") && (tiers.includes("memory") ? "both" : "disk"),
      fresh && "fresh", tall < 6 && "thin", lit > 0.5 && "on", !place.mine && "other", deep && "deep",
    ].filter(Boolean).join(" ");
    const group = draw("g", {
      class: kinds, id: `span-${place.id}`, role: "treeitem", "aria-level": box.level, "aria-label": said(place),
    });
    group.append(draw("rect", { class: "body", x: left, y: box.y, width: across, height: tall, rx: Math.min(3, across / 2) }));
    if (lit) group.append(draw("rect", { class: "lit", x: left, y: box.y, width: across * lit, height: tall, rx: Math.min(3, across / 2) }));
    if (kinds.includes("both") && tall > 8) group.append(draw("rect", { class: "below", x: left, y: box.y + tall - 3, width: across, height: 3 }));
    const words = place.inRun || tall < 13 ? "" : fitting(wordsOf(place, runWords(place)), room - 10);
    if (words) this.over.push(draw("text", { x: left + 6, y: box.y + tall / 2 + 4, class: lit > 0.5 ? "on" : "" }, words));
    if (place.checkpoint && tall > 5) {
      const cx = left + wide - GAP;
      this.over.push(draw("circle", { class: "point", cx, cy: box.y + tall - Math.min(7, tall / 2), r: Math.min(2.8, tall / 3) }));
    }
    group.addEventListener("pointerenter", () => this._tell(place));
    group.addEventListener("click", () => {
      this._move(place.id);
      if (deep) this._open(place);
    });
    svg.append(group);
    this.places.push({ id: place.id, place, parent, y: box.y, left });
  }

  /** The share of a span that the last request reused. */
  _lit(place) {
    if (!place.used_last) return 0;
    if (this.reused === null) return 1;
    return Math.min(Math.max((this.reused - place.start) / place.tokens, 0), 1);
  }

  _open(place) {
    const id = place.merged ? place.id.slice(0, -1) : place.id;
    if (id !== this.root && id !== "0") this.enter(id);
  }

  _tell(place) {
    this.told = place;
    const shown = place ?? this.places.find((p) => p.id === this.here)?.place;
    this.detail.classList.toggle("hint", !shown);
    this.detail.textContent = shown || !this.places.length ? "" : HINT;
    if (!shown) return;
    const [first, ...rest] = said(shown).split(" · ");
    const head = document.createElement("b");
    head.textContent = first;
    this.detail.append(head, rest.length ? ` · ${rest.join(" · ")}` : "");
  }

  _move(id) {
    if (id === undefined) return;
    this.here = id;
    this._mark();
    this._tell(null);
  }

  _mark() {
    for (const group of this.element.querySelectorAll(".here")) group.classList.remove("here");
    const group = this.here && document.getElementById(`span-${this.here}`);
    if (group) {
      group.classList.add("here");
      this.element.setAttribute("aria-activedescendant", group.id);
    } else this.element.removeAttribute("aria-activedescendant");
  }

  _key(event) {
    const at = this.places.find((p) => p.id === this.here);
    const near = {
      ArrowRight: () => this.places.find((p) => p.parent?.id === this.here),
      ArrowLeft: () => this.places.find((p) => p.id === at?.parent?.id),
      ArrowDown: () => this._beside(at, 1),
      ArrowUp: () => this._beside(at, -1),
      Home: () => this.places[0],
      End: () => this.places.at(-1),
    }[event.key];
    if (near) {
      event.preventDefault();
      this._move((near() ?? at ?? this.places[0])?.id);
    } else if (event.key === "Enter" && at) {
      this._open(at.place);
    } else if (event.key === "Escape" && this.root !== null) {
      this.enter(null);
    }
  }

  /** Finds the next span up or down whose beginning is nearest to this span's beginning. */
  _beside(at, by) {
    if (!at) return undefined;
    const beyond = this.places.filter((p) => (by > 0 ? p.y > at.y + 0.5 : p.y < at.y - 0.5));
    const far = (p) => Math.abs(p.y - at.y) * 1000 + Math.abs(p.left - at.left);
    return beyond.sort((a, b) => far(a) - far(b))[0];
  }
}

function leavesOf(place) {
  place.leaves ??= place.children.length
    ? place.children.reduce((sum, child) => sum + leavesOf(child), 0)
    : 1;
  return place.leaves;
}

/** Counts the tokens of a message, over the spans that follow each other without a branch. */
function runOf(place) {
  const [next] = place.children;
  const same = place.tokens && place.children.length === 1 && !next.merged
    && next.label && !next.label.messages && next.label.role === place.label?.role;
  if (!same) {
    place.endsRun = true;
    return place.tokens;
  }
  next.inRun = true;
  next.run = runOf(next);
  return place.tokens + next.run;
}

function reach(place) {
  const own = place.merged ? place.start : place.start + place.tokens;
  return [own, ...place.children.flatMap(reach)];
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least) ?? power;
}

function wordsOf(place, text = place.label?.text) {
  return place.merged ? "" : [place.label?.role, text].filter(Boolean).join(" · ");
}

/** Gives the first words of a block. Its first span may have none, only tokens of the template. */
function runWords(place) {
  const text = place.label?.text;
  if (text || place.endsRun) return text;
  return runWords(place.children[0])?.replace(/^… /, "");
}

/** Shortens a label to the width: to the role at least, or to nothing. */
function fitting(words, width) {
  const most = Math.floor(width / 5.8);
  if (words.length <= most) return words;
  const [role] = words.split(" · ");
  if (most < role.length + 6) return most >= role.length ? role : "";
  return `${words.slice(0, most - 1).trimEnd()}…`;
}

/** Describes a span in words. */
function said(place) {
  const bytes = Object.entries(place.bytes).map(
    ([tier, kinds]) => `${size(Object.values(kinds).reduce((a, b) => a + b, 0))} ${tier === "memory" ? "in memory" : "on disk"}`,
  );
  if (place.merged) {
    return [
      `${count(place.merged)} more branches`, `${count(place.tokens)} tokens in ${count(place.nodes)} spans`, ...bytes,
    ].join(" · ");
  }
  const whose = place.mine ? wordsOf(place) || "a span" : "another tenant's span";
  const parts = [whose, `${count(place.tokens)} tokens from ${count(place.start)}`, ...bytes];
  if (place.checkpoint) parts.push(`checkpoint: ${place.checkpoint}`);
  parts.push(place.hits ? `reused ${count(place.hits)} ${place.hits === 1 ? "time" : "times"}` : "not reused yet");
  return parts.join(" · ");
}
