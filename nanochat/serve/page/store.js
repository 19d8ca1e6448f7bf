// Stores chats and settings in localStorage, shared by all tabs.
//
//   nanochat:chat:<id>   one chat (chat.js); deleted 30 days after it was moved to the trash
//   nanochat:settings    {system, temperature, ..., model}
//
// Every tab has all chats in memory. Saving merges with the stored copy, and storage events from
// other tabs are merged too. If two tabs save at once and one overwrites the other, the tab whose
// messages are missing saves again.

import { checkedChat, merge } from "./chat.js";

const CHAT = "nanochat:chat:";
const SETTINGS = "nanochat:settings";
const TRASH_MS = 30 * 24 * 3600 * 1000;

// In-memory fallback for this tab if the browser blocks site data.
class TabStorage {
  #values = new Map();
  get length() { return this.#values.size; }
  key(i) { return [...this.#values.keys()][i]; }
  getItem(key) { return this.#values.get(key) ?? null; }
  setItem(key, value) { this.#values.set(key, value); }
  removeItem(key) { this.#values.delete(key); }
}

function openStorage() {
  try {
    localStorage.getItem(SETTINGS);
    return localStorage;
  } catch (error) {
    return new TabStorage();
  }
}

const storage = openStorage();
const storedKeys = () => Array.from({ length: storage.length }, (_, i) => storage.key(i));

export const chats = new Map(); // id -> chat, trashed ones included
export const settings = {};
const lastRaw = new Map(); // id -> last stored text that was merged
const removed = new Map(); // id of a permanently deleted chat -> time it was moved to the trash
const unsaved = new Set(); // ids of chats that did not fit into storage
const listeners = { chats: [], settings: [], trouble: [] };

// on("chats", (id) => ...): a chat was changed by another tab or outside the open thread.
// on("settings", () => ...). on("trouble", (text) => ...): reading or saving failed.
export function on(event, listener) {
  listeners[event].push(listener);
}

export function emit(event, value) {
  for (const listener of listeners[event]) listener(value);
}

// Load chats and settings.
export function loadAll() {
  const damaged = [];
  if (storage instanceof TabStorage) emit("trouble", "This browser blocks site data. Chats are lost when this tab is closed.");
  for (const key of storedKeys().filter((name) => name.startsWith(CHAT))) {
    const raw = storage.getItem(key), chat = parseChat(raw);
    if (!chat || CHAT + chat.id !== key) damaged.push(key);
    else if (chat.trash.on && Date.now() - chat.trash.at > TRASH_MS) storage.removeItem(key);
    else {
      chats.set(chat.id, chat);
      lastRaw.set(chat.id, raw);
    }
  }
  if (damaged.length) emit("trouble", `Some stored chats are damaged. They are not shown and not deleted: ${damaged.join(", ")}`);
  readSettings();
}

function parse(raw) {
  try {
    return JSON.parse(raw);
  } catch (error) {
    return null;
  }
}

const parseChat = (raw) => (raw === null ? null : checkedChat(parse(raw)));

// ---- chats

// Merge a chat with the stored copy and save it. Returns false if storage is full.
export function saveChat(chat) {
  if (removed.has(chat.id)) return true; // deleted while an answer is generated
  if (!chats.has(chat.id)) chats.set(chat.id, chat);
  mergeStored(chat);
  const raw = JSON.stringify(chat);
  try {
    storage.setItem(CHAT + chat.id, raw);
  } catch (error) {
    unsaved.add(chat.id);
    emit("trouble", "Browser storage is full. New messages are lost when this tab is closed. " +
      "Export your chats, then delete some and empty the trash.");
    return false;
  }
  lastRaw.set(chat.id, raw);
  unsaved.delete(chat.id);
  return true;
}

function mergeStored(chat) {
  const raw = storage.getItem(CHAT + chat.id);
  if (raw === null || raw === lastRaw.get(chat.id)) return;
  const stored = parseChat(raw);
  if (stored) merge(chat, stored);
}

export function hasUnsaved() {
  return unsaved.size > 0;
}

// Save the unsaved chats again, because space may have been freed.
export function saveUnsaved() {
  for (const id of [...unsaved]) {
    if (chats.has(id) && !saveChat(chats.get(id))) return;
  }
}

export function rename(chat, text) {
  chat.title = { text: text.trim(), at: Date.now() };
  saveChat(chat);
  emit("chats", chat.id);
}

export function setTrashed(chat, isTrashed) {
  chat.trash = { on: isTrashed, at: Date.now() };
  saveChat(chat);
  emit("chats", chat.id);
}

// Delete a chat permanently. Throws if it is not in the trash.
export function removeForever(chat) {
  if (!chat.trash.on) throw new Error(`chat ${chat.id} is not in the trash`);
  removed.set(chat.id, chat.trash.at);
  chats.delete(chat.id);
  lastRaw.delete(chat.id);
  unsaved.delete(chat.id);
  storage.removeItem(CHAT + chat.id);
  saveUnsaved();
  emit("chats", chat.id);
}

// Import a chat from a file, merging it with the existing copy, if any. Returns the chat.
export function receive(chat) {
  const mine = chats.get(chat.id), wasRemoved = removed.delete(chat.id);
  if (mine) merge(mine, chat);
  const kept = mine || chat;
  if (kept.trash.on || wasRemoved) kept.trash = { on: false, at: Date.now() };
  saveChat(kept);
  emit("chats", kept.id);
  return kept;
}

// ---- other tabs

function onStorage(event) {
  if (event.storageArea !== storage || event.key === null) return;
  if (event.key === SETTINGS) {
    readSettings();
    emit("settings");
  } else if (event.key.startsWith(CHAT)) {
    if (event.newValue === null) removedElsewhere(event.key.slice(CHAT.length));
    else receiveFromTab(event.newValue);
  }
}

function removedElsewhere(id) {
  const { trash } = chats.get(id) || {};
  if (!trash?.on) return; // not deleted by this page: keep it in memory
  removed.set(id, trash.at);
  chats.delete(id);
  lastRaw.delete(id);
  unsaved.delete(id);
  emit("chats", id);
}

function receiveFromTab(raw) {
  const chat = parseChat(raw);
  if (!chat) return;
  if (removed.has(chat.id) && chat.trash.at <= removed.get(chat.id)) { // saved by a tab before it saw the deletion
    storage.removeItem(CHAT + chat.id);
    return;
  }
  removed.delete(chat.id);
  const mine = chats.get(chat.id);
  if (!mine) chats.set(chat.id, chat);
  else {
    merge(mine, chat);
    if (merge(chat, mine)) setTimeout(() => repair(mine), 20 + Math.random() * 100);
  }
  emit("chats", chat.id);
}

// Save again if the stored copy still lacks our messages.
function repair(mine) {
  const stored = parseChat(storage.getItem(CHAT + mine.id));
  if (chats.has(mine.id) && (!stored || merge(stored, mine))) saveChat(mine);
}

export function followOtherTabs() {
  window.addEventListener("storage", onStorage);
}

// ---- settings

function readSettings() {
  const kept = parse(storage.getItem(SETTINGS) || "{}");
  for (const name of Object.keys(settings)) delete settings[name];
  for (const [name, value] of Object.entries(kept || {})) {
    if (["string", "number", "boolean"].includes(typeof value)) settings[name] = value;
  }
}

export function saveSettings() {
  try {
    storage.setItem(SETTINGS, JSON.stringify(settings));
  } catch (error) {
    emit("trouble", "Browser storage is full. The settings are not saved.");
  }
}
