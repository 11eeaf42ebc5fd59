// Requests to the server: the API key, JSON, and streams.

const KEPT = "rewarm.key";
let asking = null;

export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(KEPT) !== null;

export function forgetKey() {
  sessionStorage.removeItem(KEPT);
  location.reload();
}

/** Ask for the API key, once for everything that waits for it. */
function askForKey(wrong) {
  asking ??= new Promise((done) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    const note = document.getElementById("key-note");
    if (wrong) note.textContent = "That key is not this server's. Try again.";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEPT, field.value);
      field.value = "";
      asking = null;
      done();
    }, { once: true });
    dialog.showModal();
    field.focus();
  });
  return asking;
}

async function send(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEPT);
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    let reply;
    try {
      reply = await fetch(path, { cache: "no-store", ...options, headers });
    } catch (problem) {
      if (options.signal?.aborted) throw problem;
      throw new Problem(0, "the server cannot be reached");
    }
    if (reply.status !== 401) return reply;
    if (sessionStorage.getItem(KEPT) === key) await askForKey(key !== null);
  }
}

async function checked(reply) {
  if (reply.ok) return reply;
  let message = `the server answered ${reply.status}`;
  try {
    message = (await reply.json()).error.message;
  } catch { /* not an error of Rewarm */ }
  throw new Problem(reply.status, message);
}

/** Gets JSON; null where it has not changed since the tag. */
export async function get(path, { tag, signal } = {}) {
  const headers = tag ? { "If-None-Match": tag } : {};
  const reply = await send(path, { headers, signal });
  if (reply.status === 304) return null;
  await checked(reply);
  return { body: await reply.json(), tag: reply.headers.get("ETag") };
}

/** Gives the chunks of a chat's answer as they come, and its comments as `{ progress }`. */
export async function* stream(body, signal) {
  const reply = await checked(await send("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  }));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const progress = /^: prefill (\d+)\/(\d+)/.exec(event);
      if (progress) yield { progress: [Number(progress[1]), Number(progress[2])] };
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Problem(500, chunk.error.message);
      yield chunk;
    }
  }
}
