// The page: it connects the parts, and polls the server while the page is visible.

import { Problem, forgetKey, get, hasKey } from "./api.js";
import { Chat } from "./chat.js";
import { showCache, showLive } from "./figures.js";
import { byId } from "./show.js";
import { Tree } from "./tree.js";

const EVERY = 1000;
const TREE_EVERY = 2000;
const AFTER_FAILURE = 5000;

const tree = new Tree();
const chat = new Chat((answer) => {
  if (answer.cost) tree.reused = answer.cost.cached_tokens;
  drawn = 0;
  look();
});

let timer = null;
let looking = false;
let hasLive = true;
let seen = "";
let drawn = 0;

async function look() {
  clearTimeout(timer);
  if (looking || document.hidden) return;
  looking = true;
  let wait = EVERY;
  try {
    const live = hasLive ? await liveOrNot() : null;
    if (live) {
      showLive(live);
      say(live.state, live.model, (live.requests ?? []).length > 0);
    }
    const changes = live?.cache
      ? JSON.stringify([live.cache.hits, live.cache.misses, live.cache.tokens, live.cache.checkpoints, live.cache.evictions])
      : null;
    const loading = live !== null && !live.cache;
    if (!loading && (changes === null || changes !== seen) && Date.now() - drawn >= TREE_EVERY) {
      drawn = Date.now();
      const last = live?.recent?.find((r) => r.own && r.prompt_tokens);
      const cache = await tree.refresh(last?.cached_tokens);
      if (cache && !live) showCache(cache);
      seen = changes ?? "";
    }
    if (!live) say("ready");
    byId("forget-key").hidden = !hasKey();
  } catch (problem) {
    wait = AFTER_FAILURE;
    if (!(problem instanceof Problem)) console.error(problem);
    say(problem.status === 503 ? "loading" : "unreachable");
  }
  looking = false;
  timer = setTimeout(look, wait);
}

/** Asks for live figures. A server without the endpoint is asked only once. */
async function liveOrNot() {
  try {
    return (await get("/v1/live")).body;
  } catch (problem) {
    if (problem.status !== 404) throw problem;
    hasLive = false;
    const models = await get("/v1/models");
    say("ready", models.body.data[0].id);
    return null;
  }
}

function say(state, model, busy = false) {
  byId("state").textContent = busy ? "working" : state;
  byId("state").className = `soft ${busy ? "busy" : state}`;
  if (model && byId("model").textContent !== model) {
    byId("model").textContent = model;
    byId("curl").textContent = curlOf(model);
  }
}

/** Makes a line to paste, for the same server and model. */
function curlOf(model) {
  const body = { model, messages: [{ role: "user", content: "What is 34 + 58?" }], max_tokens: 256 };
  const key = hasKey() ? ` \\\n  -H "Authorization: Bearer $REWARM_API_KEY"` : "";
  const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${location.origin}/v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${quoted}'`;
}

/** Copies the line. Browsers allow this for https and this machine only; else it is selected. */
async function copyCurl() {
  try {
    await navigator.clipboard.writeText(byId("curl").textContent);
    byId("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(byId("curl"));
    byId("copy").textContent = "Selected";
  }
  setTimeout(() => { byId("copy").textContent = "Copy"; }, 1500);
}

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const other of document.querySelectorAll("nav button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}
byId("forget-key").addEventListener("click", forgetKey);
byId("copy").addEventListener("click", copyCurl);
document.addEventListener("visibilitychange", look);
look();
