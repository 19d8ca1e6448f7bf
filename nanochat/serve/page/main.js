// Entry point: routing, composer, settings, keyboard shortcuts.

import { ask, isRunning, onAnswers, stopAll } from "./answers.js";
import { chooseModel, isBase, KeyNeeded, loadModels, server, showModel } from "./api.js";
import { newChat, textOf, titleOf } from "./chat.js";
import { $, announce, button, hideToast, isTouch, toast } from "./dom.js";
import { closeDrawer, focusSearch, isDrawerOpen, markNews, renderList, startSidebar, toggleSidebar } from "./sidebar.js";
import { chats, followOtherTabs, hasUnsaved, loadAll, on, saveSettings, settings } from "./store.js";
import {
  edit, followChat, grow, isBusy, isBusyElsewhere, path, render, restoreShown, scrollToEnd, showChat, showLatestButton,
  stopShown, view,
} from "./thread.js";

const form = $("settings").querySelector("form");
const drafts = new Map(); // chat id, "" for a new chat -> text in the composer

// ---- routing

// Open the chat of the URL: #<id>, or no hash for a new chat.
function route() {
  const id = location.hash.slice(1), chat = chats.get(id) || null;
  if (id && !chat) toast("This chat was not found in this browser.");
  drafts.set(view.chat?.id || "", $("question").value);
  $("question").value = drafts.get(chat?.id || "") || "";
  drafts.delete(chat?.id || "");
  resizeComposer();
  showChat(chat);
  markNews(id, false);
  refreshTitle();
  closeDrawer();
  if (!isTouch()) $("question").focus();
}

function openNewChat() {
  if (location.hash) history.pushState(null, "", location.pathname);
  route();
}

function refreshTitle() {
  document.title = view.chat ? `${titleOf(view.chat)} - nanochat` : "nanochat";
  renderList();
}

// ---- sending messages

async function submit(text) {
  if (!text || isBusy()) return;
  if (!server.models.length) await connect();
  if (!server.models.length || isBusy()) return;
  if (view.chat?.trash.on) return toast("This chat is in the trash.", restoreShown, "Restore");
  if (isBusyElsewhere()) return toast("Another tab is generating this answer.");
  if ($("question").value.trim() === text) $("question").value = ""; // not for suggestions
  resizeComposer();
  hideToast();
  const chat = view.chat || newChat(), parent = view.chat ? view.head || null : null;
  const answer = ask(chat, parent, text);
  if (view.chat !== chat) {
    history.replaceState(null, "", `#${chat.id}`);
    showChat(chat);
  }
  Object.assign(view, { head: answer.id, editing: "" });
  render();
  scrollToEnd();
  refreshTitle();
}

onAnswers({
  start: () => renderList(),
  grow: (chat, node) => { if (view.chat === chat) grow(node); },
  end(chat, node, keyNeeded) {
    if (view.chat === chat) render();
    else markNews(chat.id, true);
    renderList();
    if (view.chat === chat) announce(node.error || textOf(node) || "The answer is empty.");
    else announce(`New answer in ${titleOf(chat)}.`);
    if (keyNeeded) openSettings("key");
  },
});

// ---- models and settings

async function connect() {
  try {
    await loadModels();
  } catch (error) {
    $("advice").textContent = error.message;
    if (error instanceof KeyNeeded) openSettings("key");
    toast(error.message, connect, "Try again");
    return;
  }
  $("ideas").replaceChildren(...server.suggestions.map((text) => button(text, () => submit(text), { className: "plain" })));
  describeModel();
}

function describeModel() {
  $("advice").textContent = isBase()
    ? "Base models are not trained on conversations: this one continues your text."
    : "Its answers are based only on its training data.";
}

function openSettings(focus) {
  for (const field of form.elements) {
    if (!field.name) continue;
    field.value = settings[field.name] ?? "";
    if (field.name in server.defaults) field.placeholder = server.defaults[field.name];
  }
  if (!$("settings").open) $("settings").showModal();
  if (focus) form.elements[focus].focus();
}

function closeSettings() {
  for (const field of form.elements) {
    if (field.name && field.validity.valid) settings[field.name] = field.value;
  }
  saveSettings();
  applyTheme();
  if (!server.models.length) connect();
}

function applyTheme() {
  if (settings.theme) document.documentElement.dataset.theme = settings.theme;
  else delete document.documentElement.dataset.theme;
}

// ---- composer and keyboard

function resizeComposer() {
  const area = $("question");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function onComposerKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("question").value && !isBusy() && !view.chat?.trash.on) {
    const question = path().findLast((node) => node.role === "user");
    if (!question) return;
    event.preventDefault();
    edit(question);
  }
}

function onKey(event) {
  if (!event.key || event.isComposing) return; // autofill, input method
  const command = (event.ctrlKey || event.metaKey) && !event.altKey;
  const key = event.key.toLowerCase(), isOpen = document.querySelector("dialog[open]") !== null;
  if (isOpen) return;
  if (event.key === "Escape") {
    if (isDrawerOpen()) closeDrawer();
    else if (isBusy()) stopShown();
    return;
  }
  const act = !command ? null : event.shiftKey
    ? { o: openNewChat, s: toggleSidebar }[key]
    : { k: focusSearch, ",": () => openSettings(), "/": () => $("help").showModal() }[key];
  if (!act) return;
  event.preventDefault();
  act();
}

function bind() {
  const click = (id, act) => $(id).addEventListener("click", act);
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit($("question").value.trim());
  });
  $("question").addEventListener("input", resizeComposer);
  $("question").addEventListener("keydown", onComposerKey);
  $("scroll").addEventListener("scroll", showLatestButton, { passive: true });
  click("latest", () => { scrollToEnd(); $("question").focus(); });
  click("stop", stopShown);
  click("new", openNewChat);
  click("open-settings", () => openSettings());
  click("open-help", () => $("help").showModal());
  click("restore", restoreShown);
  click("defaults", () => {
    for (const name of [...Object.keys(server.defaults), "seed"]) form.elements[name].value = "";
  });
  $("settings").addEventListener("close", closeSettings);
  $("model").addEventListener("change", () => { chooseModel(); describeModel(); });
  document.addEventListener("keydown", onKey);
  window.addEventListener("popstate", route);
  window.addEventListener("pagehide", stopAll);
  window.addEventListener("beforeunload", (event) => { if (hasUnsaved()) event.preventDefault(); });
}

// Handle changes from other tabs and from the chat list.
function follow() {
  on("chats", (id) => {
    if (view.chat?.id === id && !chats.has(id)) return openNewChat();
    if (view.chat?.id === id) followChat($("question").value.trim() !== "");
    refreshTitle();
  });
  on("settings", () => { applyTheme(); showModel(); describeModel(); });
  on("trouble", (text) => { $("trouble").querySelector("span").textContent = text; $("trouble").hidden = false; });
  $("trouble").querySelector("button").addEventListener("click", () => { $("trouble").hidden = true; });
  followOtherTabs();
  // Rerender regularly: when another tab stops updating an answer, it can be continued here.
  setInterval(() => { if (view.chat && !isRunning(view.chat.nodes[view.head])) render(); }, 5000);
}

follow();
loadAll();
applyTheme();
bind();
startSidebar();
route();
connect();
