// Generates answers. A running answer continues while another chat is open; several can run at once.

import { isBase, KeyNeeded, samplingSettings, streamAnswer } from "./api.js";
import { addMessage, asMessages, pathTo, textOf, textPart } from "./chat.js";
import { $ } from "./dom.js";
import { saveChat, settings } from "./store.js";

const SAVE_MS = 1000; // minimum time between saves of a growing answer
const HEARTBEAT_MS = 4000; // save even without new text, so that other tabs see it is running

export const running = new Map(); // message id -> {chat, node, control}
let listener = { grow() {}, start() {}, end() {} };

export function onAnswers(found) {
  listener = found;
}

export const isRunning = (node) => running.has(node?.id);
export const chatIsRunning = (id) => [...running.values()].some((run) => run.chat.id === id);

// Ask a question below a message (`parent`: its id, or null). Returns the answer message.
export function ask(chat, parent, text) {
  const question = addMessage(chat, parent, "user", [textPart(text)]);
  return answer(chat, question.id);
}

// Generate another answer to the same question.
export function retry(chat, node) {
  return answer(chat, node.parent);
}

// Continue an answer that was stopped or cut off, as a new message that starts with its parts. A
// tool call without a result is dropped; the model repeats it.
export function continueAnswer(chat, node) {
  const parts = node.parts.map((part) => ({ ...part }));
  if (parts.at(-1)?.type === "python") parts.pop();
  return answer(chat, node.parent, { continues: node.id, parts, tokens: node.tokens || 0, seconds: node.seconds || 0 });
}

function answer(chat, question, more = {}) {
  const model = $("model").value;
  const { parts = [], ...rest } = more;
  const system = isBase(model) ? "" : settings.system || chat.system;
  const extra = { model, ...(system && { system }), ...rest };
  const node = addMessage(chat, question, "assistant", parts, extra);
  const run = { chat, node, control: new AbortController(), savedAt: 0 };
  running.set(node.id, run);
  save(run);
  generate(run);
  listener.start(chat, node);
  return node;
}

function save(run) {
  run.node.rev++;
  run.node.saved = run.savedAt = Date.now();
  return saveChat(run.chat);
}

export function stop(node) {
  running.get(node?.id)?.control.abort();
}

export function stopChat(id) {
  for (const run of running.values()) if (run.chat.id === id) run.control.abort();
}

// Save the partial answers when the tab is closed.
export function stopAll() {
  for (const run of running.values()) {
    run.node.stopped = true;
    save(run);
  }
}

function request({ chat, node }) {
  const path = pathTo(chat, node.id), before = path.slice(0, -1);
  const common = {
    model: node.model, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
    ...samplingSettings(),
  };
  if (isBase(node.model)) return ["/v1/completions", { ...common, prompt: textOf(before.at(-1)) + textOf(node) }];
  const messages = asMessages(node.parts.length ? path : before);
  if (node.system) messages.unshift({ role: "system", content: node.system });
  return ["/v1/chat/completions", { ...common, messages, truncation: "auto" }];
}

async function generate(run) {
  const { node, control } = run, before = { tokens: node.tokens || 0, seconds: node.seconds || 0 };
  const heartbeat = setInterval(() => save(run), HEARTBEAT_MS);
  let first = 0;
  try {
    for await (const event of streamAnswer(...request(run), control.signal)) {
      const choice = event.choices[0];
      if (choice) addDelta(node, choice);
      if (event.usage && event.usage.completion_tokens) {
        first = first || performance.now();
        node.tokens = before.tokens + event.usage.completion_tokens;
        node.seconds = before.seconds + (performance.now() - first) / 1000;
      }
      listener.grow(run.chat, node);
      if (Date.now() - run.savedAt > SAVE_MS) save(run);
    }
    if (!node.finish) throw new Error("The stream ended before the answer was complete.");
    delete node.stopped;
  } catch (error) {
    if (error.name === "AbortError") node.stopped = true;
    else if (!node.stopped) node.error = error.message;
    run.keyNeeded = error instanceof KeyNeeded;
  }
  clearInterval(heartbeat);
  running.delete(node.id);
  save(run);
  listener.end(run.chat, node, run.keyNeeded);
}

// Append a stream delta to the parts of an answer.
function addDelta(node, choice) {
  const delta = choice.delta || { content: choice.text };
  const calls = (delta.parts || []).filter((part) => part.type !== "text"); // text is in the content
  for (const { type, text } of delta.content ? [textPart(delta.content), ...calls] : calls) {
    const last = node.parts.at(-1);
    if (last?.type === type) last.text += text;
    else node.parts.push({ type, text });
  }
  if (choice.finish_reason) node.finish = choice.finish_reason;
}
