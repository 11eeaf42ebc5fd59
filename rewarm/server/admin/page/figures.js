// Figures of the running server: what was reused, how soon answers began, what is held.

import { bar, byId, costOf, count, draw, make, size, time, why, whyAtLength } from "./show.js";

const COLUMNS = 32;
const ROWS = 12;

export function showLive(live) {
  const done = (live.recent ?? []).filter((r) => r.prompt_tokens);
  rate(live, done);
  firstToken(live, done);
  held(live.tiers ?? {});
  requests(done);
  flight(live.requests ?? []);
}

function rate(live, done) {
  const share = live.hit_rate?.fifteen_minutes ?? live.hit_rate?.total;
  byId("rate").textContent = share === null || share === undefined ? "–" : `${Math.round(share * 100)}%`;
  byId("rate-note").textContent = "of prompt tokens, 15 minutes";
  columns(byId("rate-chart"), done, (request, height) => {
    const { reused, again, fresh } = costOf(request);
    const whole = reused + again + fresh || 1;
    return [["reused", reused], ["again", again], ["new", fresh]].map(([name, n]) => [name, (height * n) / whole]);
  });
}

function firstToken(live, done) {
  byId("ttft").textContent = time(live.ttft_ms?.p50);
  byId("ttft-note").textContent = live.ttft_ms?.p99 ? `median · 99% within ${time(live.ttft_ms.p99)}` : "median";
  const timed = done.filter((r) => r.ttft_ms !== null);
  const most = Math.max(1, ...timed.slice(0, COLUMNS).map((r) => r.ttft_ms));
  columns(byId("ttft-chart"), timed, (request, height) => [["time", Math.max((height * request.ttft_ms) / most, 1)]]);
}

/** Draws a column for each of the last requests, the newest at the right, from the bottom up. */
function columns(svg, done, parts) {
  const width = svg.clientWidth || 240;
  const height = 52;
  const wide = width / COLUMNS;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const drawn = [draw("line", { class: "base", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 })];
  done.slice(0, COLUMNS).forEach((request, i) => {
    let y = height - 1;
    const column = draw("g", {}, draw("title", {}, `${count(request.cached_tokens)} of ${count(request.prompt_tokens)} tokens reused, first token ${time(request.ttft_ms)}`));
    for (const [name, tall] of parts(request, height - 2)) {
      y -= tall;
      column.append(draw("rect", { class: name, x: width - (i + 1) * wide, y, width: Math.max(wide - 1.5, 1), height: Math.max(tall, 0) }));
    }
    drawn.push(column);
  });
  svg.replaceChildren(...drawn);
}

function held(tiers) {
  byId("disk-key").hidden = !tiers.disk;
  byId("bytes").replaceChildren(...Object.entries(tiers).map(([tier, of]) => {
    const line = make("div", { class: "bar", role: "img", "aria-label": `${size(of.held)} of ${size(of.budget)} in ${tier}` });
    let used = 0;
    for (const [kind, bytes] of Object.entries(of.kinds)) {
      if (!bytes) continue;
      used += bytes;
      const part = make("i", { class: kind, title: `${kind}: ${size(bytes)}` });
      part.style.flexGrow = bytes;
      line.append(part);
    }
    const free = make("i");
    free.style.flexGrow = Math.max(of.budget - used, 0);
    line.append(free);
    const kinds = Object.entries(of.kinds).filter(([kind, bytes]) => bytes && kind !== "files");
    return make("div", { class: "tier" },
      make("p", {}, make("b", {}, size(of.held)), ` of ${size(of.budget)} ${tier}`),
      line,
      make("p", { class: "soft" }, kinds.map(([kind, bytes]) => `${kind} ${size(bytes)}`).join(" · ")),
    );
  }));
}

function requests(done) {
  const cell = { role: "cell" };  // the role is explicit: on a phone's layout, the browser sees no table
  const rows = done.slice(0, ROWS).map((request) => make("tr", { role: "row" },
    make("td", cell, `${count(request.prompt_tokens)} tokens`),
    make("td", cell, bar(costOf(request))),
    make("td", cell, time(request.ttft_ms)),
    make("td", { ...cell, title: whyAtLength(request.miss) }, reason(request)),
  ));
  const body = byId("requests").tBodies[0];
  if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: "4" }, "None yet.")));
  body.replaceChildren(...rows);
}

function reason(request) {
  if (request.status >= 400) return request.status === 499 ? "stopped" : `ended with ${request.status}`;
  return why(request.miss) || "all that was known was reused";
}

function flight(running) {
  byId("flight").textContent = running.length
    ? running.slice(0, 3).map((r) => {
      if (r.stage === "prefilling") return `reading ${count(r.cached_tokens + r.prefilled_tokens)} of ${count(r.prompt_tokens)}`;
      return r.stage === "decoding" ? `writing, ${count(r.generated_tokens)} tokens` : "waiting";
    }).join(", ") + (running.length > 3 ? ` and ${running.length - 3} more` : "")
    : "";
}

/** Shows the cache's own figures, where the server has no live endpoint. */
export function showCache(cache) {
  const { budget, bytes } = cache;
  const total = (kinds) => Object.values(kinds).reduce((a, b) => a + b, 0);
  held({ memory: { budget, held: total(bytes.memory), kinds: bytes.memory } });
}
