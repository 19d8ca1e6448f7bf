// Data model of a conversation: a tree of messages, of which one path is shown.
//
//   chat     {id, created, updated, system, title: {text, at}, head: {id, at}, trash: {on, at}, nodes}
//   message  {id, parent, role, parts, created, rev, saved, ...} in `nodes`, by id
//
// Only the tab that created a message changes it, incrementing `rev`; a retry, an edited question and
// the continuation of an answer are new messages. So copies of a chat merge without conflicts: the
// union of all messages, each in its newest revision, and the latest title, head and trash.
// `system` is the system prompt of an imported chat and never changes.

const ROLES = ["user", "assistant"];
const PART_TYPES = ["text", "python", "python_output"];
const TEXTS = ["model", "system", "finish", "error", "continues"];
const NUMBERS = ["created", "rev", "saved", "tokens", "seconds"];
const ID = /^[a-z0-9][a-z0-9-]{0,63}$/i;
const TITLE_LENGTH = 60;
// A tab that generates an answer saves it every few seconds. An unfinished answer not saved for this
// long is considered interrupted.
const SILENT_MS = 20_000;

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");
}

export function newChat(id = newId(), now = Date.now()) {
  return {
    id, created: now, updated: now, system: "", title: { text: "", at: 0 }, head: { id: "", at: 0 },
    trash: { on: false, at: 0 }, nodes: Object.create(null),
  };
}

// Add a message below `parent` (a message id, or null for the first question) and make it the head.
export function addMessage(chat, parent, role, parts, more = {}) {
  const now = Date.now();
  const node = { id: newId(), parent, role, parts, created: now, rev: 1, saved: now, ...more };
  chat.nodes[node.id] = node;
  chat.updated = now;
  setHead(chat, node.id);
  return node;
}

export function setHead(chat, id) {
  chat.head = { id, at: Date.now() };
}

export const textPart = (text) => ({ type: "text", text });

export function textOf(node) {
  return node.parts.filter((part) => part.type === "text").map((part) => part.text).join("");
}

export function titleOf(chat) {
  if (chat.title.text) return chat.title.text;
  const first = Object.values(chat.nodes).filter((node) => node.role === "user").sort(byTime)[0];
  const line = first ? textOf(first).trim().split("\n")[0] : "";
  if (line.length <= TITLE_LENGTH) return line || "New chat";
  return `${line.slice(0, TITLE_LENGTH).replace(/\s+\S*$/, "")}\u2026`;
}

const byTime = (a, b) => a.created - b.created || (a.id < b.id ? -1 : 1);

// ---- paths and versions

// Messages from the first one to `head`.
export function pathTo(chat, head) {
  const path = [];
  for (let node = chat.nodes[head]; node; node = chat.nodes[node.parent]) path.push(node);
  return path.reverse();
}

// parent id -> its child messages, oldest first. An answer that was continued is
// omitted if it has no messages below it: its continuation includes all of it.
export function childrenOf(chat) {
  const children = new Map(), continued = new Set(), parents = new Set();
  for (const node of Object.values(chat.nodes)) {
    parents.add(node.parent);
    if (node.continues) continued.add(node.continues);
  }
  for (const node of Object.values(chat.nodes).sort(byTime)) {
    if (continued.has(node.id) && !parents.has(node.id)) continue;
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  return children;
}

// Last message of the newest branch below a message.
export function newestBelow(chat, id) {
  const children = childrenOf(chat);
  while (children.has(id)) id = children.get(id).at(-1).id;
  return id;
}

export function isBelow(chat, id, ancestor) {
  if (!ancestor) return true;
  return pathTo(chat, id).some((node) => node.id === ancestor || node.continues === ancestor);
}

// ---- answers

export const isFinished = (node) => node.role === "user" || Boolean(node.finish || node.stopped || node.error);

// Whether another tab may be generating this answer. (For this tab see answers.js.)
export const isRecent = (node) => !isFinished(node) && Date.now() - node.saved < SILENT_MS;

// Whether an answer was cut off and has text to continue.
export const isIncomplete = (node) => node.role === "assistant" && node.finish !== "stop" && textOf(node) !== "";

// A path's messages in API format, without empty answers and the questions above them.
export function asMessages(path) {
  const kept = path.filter((node, i) => (node.role === "assistant" ? node : path[i + 1] || { parts: [1] }).parts.length);
  return kept.map(({ role, parts }) => ({
    role,
    content: parts.some((part) => part.type !== "text") ? parts : parts.map((part) => part.text).join(""),
  }));
}

// ---- copies of a chat

const isLater = (a, b) => a.at > b.at || (a.at === b.at && JSON.stringify(a) > JSON.stringify(b));

// Merge everything new in `other` into `chat`. Returns whether `chat` changed.
export function merge(chat, other) {
  let changed = false;
  for (const node of Object.values(other.nodes)) {
    const mine = chat.nodes[node.id];
    if (mine && mine.rev >= node.rev) continue;
    chat.nodes[node.id] = node;
    changed = true;
  }
  for (const field of ["title", "head", "trash"]) {
    if (!isLater(other[field], chat[field])) continue;
    chat[field] = other[field];
    changed = true;
  }
  if (other.updated > chat.updated) {
    chat.updated = other.updated;
    changed = true;
  }
  return changed;
}

// Validate a chat from storage or a file and drop unknown fields; null if it is invalid. Messages
// whose parent is missing become first messages.
export function checkedChat(value) {
  if (!value || typeof value !== "object" || !ID.test(value.id) || !value.nodes || typeof value.nodes !== "object") return null;
  const number = (x) => (Number.isFinite(x) ? x : 0), text = (x) => (typeof x === "string" ? x : "");
  const chat = newChat(value.id, number(value.created));
  chat.updated = number(value.updated);
  chat.system = text(value.system);
  chat.title = { text: text(value.title?.text), at: number(value.title?.at) };
  chat.head = { id: text(value.head?.id), at: number(value.head?.at) };
  chat.trash = { on: value.trash?.on === true, at: number(value.trash?.at) };
  for (const [id, node] of Object.entries(value.nodes)) {
    const checked = checkedMessage(id, node);
    if (!checked) return null;
    chat.nodes[id] = checked;
  }
  cutCycles(chat);
  if (!chat.nodes[chat.head.id]) {
    const newest = Object.values(chat.nodes).sort(byTime).at(-1);
    chat.head = { id: newest ? newest.id : "", at: 0 };
  }
  return chat;
}

function checkedMessage(id, node) {
  if (!ID.test(id) || !node || !ROLES.includes(node.role) || !Array.isArray(node.parts)) return null;
  const parts = [];
  for (const part of node.parts) {
    if (!part || !PART_TYPES.includes(part.type) || typeof part.text !== "string") return null;
    parts.push({ type: part.type, text: part.text });
  }
  const found = { id, parent: typeof node.parent === "string" ? node.parent : null, role: node.role, parts, created: 0, rev: 0, saved: 0 };
  for (const name of NUMBERS) if (Number.isFinite(node[name])) found[name] = node[name];
  for (const name of TEXTS) if (typeof node[name] === "string" && node[name]) found[name] = node[name];
  if (node.stopped === true) found.stopped = true;
  return found;
}

function cutCycles(chat) {
  const safe = new Set([null]);
  for (const start of Object.values(chat.nodes)) {
    const passed = new Set();
    for (let node = start; !safe.has(node.id); node = chat.nodes[node.parent]) {
      passed.add(node.id);
      if (chat.nodes[node.parent] && !passed.has(node.parent)) continue;
      node.parent = null;
      break;
    }
    for (const id of passed) safe.add(id);
  }
}
