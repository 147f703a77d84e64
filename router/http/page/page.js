"use strict";
// A chat that streams, the timeline of its newest answer, and the two pools. All text goes in as text, never as markup.

const byId = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
const PHASES = [["queue", "queue"], ["prefill", "prefill"], ["transfer", "handoff_exposed"], ["decode", "decode"]];

let messages = [];
let running = null;
let served = [];

const headers = () => {
  const key = byId("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

const say = (role, text) => {
  const item = make("li", role, text);
  byId("messages").append(item);
  item.scrollIntoView({ block: "nearest" });
  return item;
};

// Server-sent events of a response, one parsed object each, up to [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  say("user", text);
  const item = say("assistant", "");
  const reasoning = make("span", "reasoning");
  const content = make("span", "content");
  item.append(reasoning, content);
  running = new AbortController();
  toggle(true);
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: running.signal,
      body: JSON.stringify({
        messages,
        stream: true,
        stream_options: { include_usage: true },
        temperature: Number(byId("temperature").value),
        max_tokens: Number(byId("longest").value),
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      reasoning.textContent += delta.reasoning_content ?? "";
      content.textContent += delta.content ?? "";
      if (event.timings) draw(event.timings, event.usage);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      item.classList.add("error");
      content.textContent += `\n${error.message}`;
    }
  } finally {
    messages.push({ role: "assistant", content: content.textContent });
    running = null;
    toggle(false);
    pools();
  }
}

const toggle = (busy) => {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
};

const draw = (timings, usage) => {
  const total = PHASES.reduce((sum, [, key]) => sum + timings[key], 0) || 1;
  const bars = PHASES.map(([name, key]) => {
    const bar = make("span", name);
    bar.style.width = `${(100 * timings[key]) / total}%`;
    bar.title = `${name} ${timings[key].toFixed(3)} s`;
    return bar;
  });
  byId("timeline").replaceChildren(...bars);
  const seconds = PHASES.map(([name, key]) => `${name} ${timings[key].toFixed(3)} s`).join(" · ");
  const cached = usage.prompt_tokens_details.cached_tokens;
  byId("legend").textContent =
    `${seconds}\nfirst token after ${timings.ttft.toFixed(3)} s, ${usage.prompt_tokens} + ${usage.completion_tokens} tokens` +
    (cached ? `, ${cached} cached` : "");
  served = [timings.prefill_worker, timings.decode_worker];
};

async function pools() {
  const response = await fetch("/status", { headers: headers() });
  if (!response.ok) return;
  const status = await response.json();
  byId("model").textContent = status.model_name ?? "";
  const groups = ["prefill", "decode"].map((role) => {
    const group = make("div", "pool", role);
    for (const worker of (status.workers ?? []).filter((each) => each.role === role)) {
      const line = make("div", `worker ${served.includes(worker.id) ? "served" : ""}`, `${worker.id}: ${worker.state}`);
      for (const [name, pool] of [["KV blocks", worker.kv_blocks], ["state slots", worker.state_slots]]) {
        const meter = make("meter");
        meter.max = pool?.total ?? 1;
        meter.value = pool?.used ?? 0;
        meter.title = `${name}: ${pool?.used ?? 0} of ${pool?.total ?? 0}`;
        line.append(meter);
      }
      group.append(line);
    }
    return group;
  });
  byId("pools").replaceChildren(...groups);
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || running) return;
  byId("text").value = "";
  ask(text);
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("key").addEventListener("change", pools);
byId("anew").addEventListener("click", () => {
  running?.abort();
  messages = [];
  byId("messages").replaceChildren();
});
pools();
setInterval(() => { if (!document.hidden) pools(); }, 2000);
