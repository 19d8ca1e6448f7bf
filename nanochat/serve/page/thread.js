// Renders the open chat: messages, their actions, and scrolling.
//
// A message's element is kept while its key (see render) is unchanged; a growing answer is updated in
// place, at most once per frame.

import { ask, continueAnswer, isRunning, retry, stop } from "./answers.js";
import { childrenOf, isBelow, isFinished, isIncomplete, isRecent, newestBelow, pathTo, setHead, textOf } from "./chat.js";
import { $, announce, button, copyText, iconButton, isTouch, make, toast } from "./dom.js";
import { MarkdownView, objectMark, withoutMarks } from "./markdown.js";
import { saveChat, setTrashed } from "./store.js";

export const view = { chat: null, head: "", editing: "" };
const shown = new Map(); // message id -> {key, article, markdown}
const openCalls = new Set(); // expanded tool calls, as "<message id>/<number>"
let frame = 0, nextFrameAt = 0;

export const path = () => (view.chat ? pathTo(view.chat, view.head) : []);
export const last = () => view.chat?.nodes[view.head];
// Whether the last answer is being generated, by this tab or by another one.
export const isBusy = () => isRunning(last());
export const isBusyElsewhere = () => Boolean(last()) && !isBusy() && isRecent(last());

export function showChat(chat) {
  Object.assign(view, { chat, head: chat ? chat.head.id : "", editing: "" });
  for (const { article } of shown.values()) article.remove();
  shown.clear();
  render();
  scrollToEnd();
}

// Show the branch that ends at `id` and save the choice.
export function showHead(id) {
  view.head = id;
  view.editing = "";
  setHead(view.chat, id);
  saveChat(view.chat);
  render();
}

// Another tab changed the chat: show its messages if they continue the branch shown here.
export function followChat(hasDraft) {
  const { chat } = view;
  const free = !view.editing && !hasDraft && !isBusy();
  if (free && isBelow(chat, chat.head.id, view.head)) view.head = chat.head.id;
  render();
}

// ---- messages

export function render() {
  const follow = atEnd(), messages = path(), children = view.chat ? childrenOf(view.chat) : new Map();
  const log = $("log"), keep = new Set(messages.map((node) => node.id));
  for (const [id, { article }] of shown) {
    if (keep.has(id)) continue;
    article.remove();
    shown.delete(id);
  }
  messages.forEach((node, i) => {
    const versions = (children.get(node.parent) || [node]).map(({ id }) => id);
    if (!versions.includes(node.id)) versions.push(node.id);
    const context = { versions, isLast: i === messages.length - 1, busy: isBusy(), live: isRunning(node), recent: isRecent(node) };
    const isEdited = view.editing === node.id; // keep the typed text through any update
    const key = isEdited ? "editor" : JSON.stringify([context, context.live ? 0 : node.rev, view.chat.trash.on]);
    const before = shown.get(node.id);
    if (before?.key === key) return;
    const entry = { key, ...article(node, context) };
    shown.set(node.id, entry);
    if (before) before.article.replaceWith(entry.article);
    else log.insertBefore(entry.article, log.children[i] || null);
  });
  log.setAttribute("aria-busy", String(isBusy()));
  $("empty").hidden = messages.length > 0;
  $("trashed").hidden = !view.chat?.trash.on;
  $("send").hidden = isBusy();
  $("stop").hidden = !isBusy();
  if (follow) scrollToEnd();
  showLatestButton();
  restoreFocus();
}

// If the focused button was removed, focus Stop or the composer. Not on touch screens, where that
// would open the keyboard.
function restoreFocus() {
  if (document.activeElement !== document.body || isTouch() || document.querySelector("dialog[open]")) return;
  $(isBusy() ? "stop" : "question").focus();
}

function article(node, context) {
  const element = make("article", { className: node.role, "aria-label": node.role === "user" ? "You" : "Model" });
  if (context.isLast) element.dataset.last = "";
  if (context.live || context.recent) element.dataset.live = "";
  if (view.editing === node.id) {
    element.append(editor(node));
    return { article: element };
  }
  const markdown = node.role === "assistant" ? answerView(node) : null;
  element.append(markdown ? markdown.element : make("div", { className: "body", textContent: textOf(node) }));
  const note = noteOf(node, context);
  if (note) element.append(make("p", { className: node.error ? "error" : "note", textContent: note }));
  element.append(make("div", { className: "actions" }, ...actions(node, context)));
  return { article: element, markdown };
}

function noteOf(node, context) {
  if (node.error) return node.error;
  if (node.role === "user" || context.live) return "";
  if (context.recent) return "Generating in another tab.";
  if (!isFinished(node)) return "Interrupted.";
  if (!node.parts.length) return node.stopped ? "Stopped before the first token." : "The answer is empty.";
  return "";
}

function actions(node, context) {
  const { live, recent, busy, isLast } = context, found = [];
  if (context.versions.length > 1) found.push(switcher(node, context.versions));
  if (live || recent) return [...found, stats(node)];
  const copier = iconButton("copy", "Copy", () => copyText(textOf(node), copier));
  if (node.parts.length) found.push(copier);
  if (view.chat.trash.on) return [...found, stats(node)];
  if (node.role === "user") found.push(iconButton("edit", "Edit", () => edit(node), { disabled: busy }));
  else found.push(iconButton("retry", "Retry", () => generateFrom(() => retry(view.chat, node)), { disabled: busy }));
  if (isLast && isIncomplete(node)) {
    found.push(button("Continue", () => generateFrom(() => continueAnswer(view.chat, node)), { className: "quiet framed" }));
  }
  return [...found, stats(node)];
}

function stats(node) {
  return make("span", { className: "stats", textContent: statsOf(node) });
}

function statsOf(node) {
  const found = [];
  if (node.tokens) found.push(`${node.tokens} ${node.tokens === 1 ? "token" : "tokens"}`);
  if (node.tokens > 1 && node.seconds > 0) found.push(`${(node.tokens / node.seconds).toFixed(0)} tokens/s`);
  if (node.stopped) found.push("stopped");
  else if (node.finish === "length") found.push("reached the token limit");
  return found.join(" \u00b7 ");
}

function generateFrom(start) {
  view.editing = "";
  view.head = start().id;
  render();
  scrollToEnd();
}

// ---- versions and editing

function switcher(node, versions) {
  const at = versions.indexOf(node.id), kind = node.role === "user" ? "question" : "answer";
  const go = (step) => {
    const sibling = versions[at + step];
    showHead(newestBelow(view.chat, sibling));
    announce(`Version ${at + step + 1} of ${versions.length}`);
    const { article } = shown.get(sibling), [back, next] = article.querySelectorAll(".versions button");
    (step < 0 ? (back.disabled ? next : back) : (next.disabled ? back : next)).focus();
  };
  return make("span", { className: "versions", role: "group", "aria-label": `Versions of this ${kind}` },
    iconButton("previous", "Previous version", () => go(-1), { disabled: at === 0 }),
    make("span", { textContent: `${at + 1} / ${versions.length}` }),
    iconButton("next", "Next version", () => go(1), { disabled: at === versions.length - 1 }));
}

function editor(node) {
  const area = make("textarea", { value: textOf(node), "aria-label": "Edit the message" });
  const cancel = () => {
    view.editing = "";
    render();
    $("question").focus();
  };
  const submit = () => {
    const text = area.value.trim();
    if (!text || isBusy()) return;
    generateFrom(() => ask(view.chat, node.parent, text));
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      cancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  return make("div", { className: "editor" }, area, make("div", { className: "row" },
    button("Cancel", cancel, { className: "plain" }), button("Send", submit, { className: "plain strong" })));
}

export function edit(node) {
  view.editing = node.id;
  render();
  const area = $("log").querySelector("textarea");
  area.style.height = `${Math.min(area.scrollHeight + 4, innerHeight * 0.6)}px`;
  area.focus();
  area.setSelectionRange(area.value.length, area.value.length);
  area.parentElement.scrollIntoView({ block: "nearest" });
}

// ---- answers

// The text of an answer with a placeholder for each tool call, and the calls.
function textAndCalls(node) {
  const calls = [];
  let text = "";
  for (const part of node.parts) {
    if (part.type === "text") text += withoutMarks(part.text);
    else if (part.type === "python_output" && calls.length && calls.at(-1).output === null) calls.at(-1).output = part.text;
    else {
      const isCall = part.type === "python";
      calls.push({ code: isCall ? part.text : "", output: isCall ? null : part.text });
      text += objectMark(calls.length - 1);
    }
  }
  return { text, calls };
}

function answerView(node) {
  const markdown = new MarkdownView((number) => toolCall(node, number));
  markdown.update(textAndCalls(node).text);
  return markdown;
}

// An inline tool call: a button such as "3*4 = 12" that expands to code and output.
function toolCall(node, number) {
  const call = textAndCalls(node).calls[number], name = `${node.id}/${number}`;
  if (!call) return make("span");
  const details = make("span", { className: "details", hidden: !openCalls.has(name) });
  if (call.code) details.append(make("code", { textContent: call.code }));
  if (call.output !== null) details.append(make("code", { className: "output", textContent: call.output }));
  const chip = button(labelOf(call), () => {
    details.hidden = !details.hidden;
    chip.setAttribute("aria-expanded", String(!details.hidden));
    if (details.hidden) openCalls.delete(name);
    else openCalls.add(name);
  }, { className: "chip", title: "Tool call: show code and output", "aria-expanded": String(!details.hidden) });
  return make("span", { className: "tool" }, chip, details);
}

function labelOf({ code, output }) {
  const cut = (text, most) => {
    const line = text.trim().split("\n")[0];
    return line.length > most || text.trim().includes("\n") ? `${line.slice(0, most)}\u2026` : line;
  };
  if (!code) return `output: ${cut(output, 40)}`;
  return output === null ? `${cut(code, 40)} \u2026` : `${cut(code, 40)} = ${cut(output, 30) || "(no output)"}`;
}

// Render a growing answer. Skips frames so that rendering takes at most a fifth of the time.
export function grow(node) {
  if (frame || view.head !== node.id) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    const entry = shown.get(node.id), started = performance.now();
    if (!entry?.markdown || !isRunning(node)) return;
    if (started < nextFrameAt) return grow(node);
    const follow = atEnd();
    entry.markdown.update(textAndCalls(node).text);
    entry.article.querySelector(".stats").textContent = statsOf(node);
    if (follow) scrollToEnd();
    else showLatestButton();
    nextFrameAt = performance.now() + 4 * (performance.now() - started);
  });
}

export const stopShown = () => stop(last());

export function restoreShown() {
  setTrashed(view.chat, false);
  render();
  toast("Restored.");
}

// ---- scrolling

function atEnd() {
  const box = $("scroll");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

export function scrollToEnd() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
  showLatestButton();
}

export function showLatestButton() {
  $("latest").hidden = atEnd();
}
