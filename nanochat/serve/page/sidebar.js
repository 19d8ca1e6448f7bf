// Sidebar with the chat list: search, rename, delete, import, export, trash.

import { chatIsRunning, stopChat } from "./answers.js";
import { textOf, titleOf } from "./chat.js";
import { $, announce, button, download, iconButton, isTouch, make, openMenu, toast } from "./dom.js";
import { fileName, readChats, toJson, toJsonl } from "./files.js";
import { chats, receive, removeForever, rename, saveSettings, saveUnsaved, setTrashed, settings } from "./store.js";
import { view } from "./thread.js";

const DAY = 24 * 3600 * 1000;
const NARROW = matchMedia("(max-width: 52rem)");
const news = new Set(); // chats whose answer finished while another chat was open
let renaming = "", drawn = "";

export const listed = () => [...chats.values()].filter((chat) => !chat.trash.on && Object.keys(chat.nodes).length)
  .sort((a, b) => b.updated - a.updated || (a.id < b.id ? 1 : -1));
const trashed = () => [...chats.values()].filter((chat) => chat.trash.on).sort((a, b) => b.trash.at - a.trash.at);

export function markNews(id, isNew) {
  if (isNew) news.add(id);
  else news.delete(id);
}

// ---- chat list

export function renderList() {
  const query = $("search").value.trim().toLowerCase();
  const rows = listed().map((chat) => rowOf(chat, query)).filter(Boolean);
  const state = JSON.stringify([rows, renaming, new Date().toDateString(), query]);
  if (state === drawn || (renaming && $("chats").querySelector("input"))) return;
  drawn = state;
  const focused = focusedRow(), items = [];
  let group = "";
  for (const row of rows) {
    const name = groupOf(row.updated);
    if (name !== group && !query) items.push(make("li", { className: "group", textContent: name, role: "presentation" }));
    group = name;
    items.push(item(row));
  }
  if (!rows.length) items.push(make("li", { className: "none", textContent: query ? "No chats found." : "No chats yet." }));
  $("chats").replaceChildren(...items);
  if (query) announce(`${rows.length} chats found`);
  if (renaming) $("chats").querySelector("input")?.focus();
  else if (focused) document.getElementById(focused)?.focus();
}

function rowOf(chat, query) {
  const title = titleOf(chat), running = chatIsRunning(chat.id);
  const row = { id: chat.id, title, updated: dayOf(chat.updated), running, isNew: news.has(chat.id), current: view.chat === chat, excerpt: "" };
  if (!query) return row;
  row.excerpt = excerptOf(chat, query);
  return row.excerpt || title.toLowerCase().includes(query) ? row : null;
}

const dayOf = (time) => new Date(time).setHours(0, 0, 0, 0);

function groupOf(day) {
  const age = Math.round((dayOf(Date.now()) - day) / DAY);
  return age < 1 ? "Today" : age < 2 ? "Yesterday" : age < 8 ? "Previous 7 days" : age < 31 ? "Previous 30 days" : "Older";
}

function excerptOf(chat, query) {
  for (const node of Object.values(chat.nodes)) {
    const text = textOf(node), at = text.toLowerCase().indexOf(query);
    if (at >= 0) return (at > 20 ? "\u2026" : "") + text.slice(Math.max(0, at - 20), at + 60).replace(/\s+/g, " ");
  }
  return "";
}

function focusedRow() {
  return $("chats").contains(document.activeElement) ? document.activeElement.id : "";
}

function item({ id, title, running, isNew, current, excerpt }) {
  if (renaming === id) return make("li", {}, renameField(chats.get(id)));
  const link = make("a", { href: `#${id}`, id: `open-${id}`, title }, make("span", { className: "title", textContent: title }));
  if (excerpt) link.append(make("small", { textContent: excerpt }));
  if (current) link.setAttribute("aria-current", "page");
  link.addEventListener("click", closeDrawer);
  const state = running ? "Generating" : isNew ? "New answer" : "";
  if (state) link.append(make("span", { className: running ? "dot busy" : "dot", role: "img", title: state, "aria-label": state }));
  const more = iconButton("more", `Options for ${title}`, () => openChatMenu(more, chats.get(id)),
    { id: `menu-${id}`, "aria-haspopup": "menu", "aria-expanded": "false" });
  return make("li", {}, link, more);
}

function openChatMenu(trigger, chat) {
  openMenu(trigger, [
    ["Rename", () => startRename(chat)],
    ["Export as JSON", () => download(fileName(titleOf(chat), "json"), toJson([chat]))],
    ["Export as JSONL", () => download(fileName(titleOf(chat), "jsonl"), toJsonl([chat]))],
    ["Delete", () => deleteChat(chat), "danger"],
  ]);
}

function startRename(chat) {
  renaming = chat.id;
  renderList();
  $("chats").querySelector("input")?.select();
}

function renameField(chat) {
  const field = make("input", { value: titleOf(chat), maxLength: 200, "aria-label": "Title" });
  const finish = (isKept) => {
    if (renaming !== chat.id) return;
    renaming = "";
    if (isKept && field.value.trim() && field.value.trim() !== titleOf(chat)) rename(chat, field.value);
    renderList();
    document.getElementById(`menu-${chat.id}`)?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    finish(event.key === "Enter");
  });
  field.addEventListener("blur", () => finish(true));
  return field;
}

// Move a chat to the trash; a running answer is stopped and kept.
export function deleteChat(chat) {
  stopChat(chat.id);
  setTrashed(chat, true);
  const wasShown = view.chat === chat;
  if (wasShown) history.pushState(null, "", location.pathname);
  if (wasShown) dispatchEvent(new PopStateEvent("popstate"));
  toast("Moved to the trash.", () => {
    setTrashed(chat, false);
    if (wasShown) location.hash = chat.id;
  });
}

// ---- trash

export function openTrash() {
  const rows = trashed().map((chat) => make("li", {},
    make("span", {}, make("span", { className: "title", textContent: titleOf(chat) }),
      make("small", { textContent: `deleted ${new Date(chat.trash.at).toLocaleDateString()}` })),
    button("Restore", () => restore(chat), { className: "plain", "aria-label": `Restore ${titleOf(chat)}` }),
    confirmButton("Delete forever", `Delete ${titleOf(chat)} forever`, () => { removeForever(chat); openTrash(); })));
  $("trash-list").replaceChildren(...rows);
  $("trash-none").hidden = rows.length > 0;
  const empty = confirmButton("Empty trash", "Empty trash", () => { trashed().forEach(removeForever); openTrash(); });
  empty.id = "empty-trash";
  empty.disabled = !rows.length;
  $("empty-trash").replaceWith(empty);
  if (!$("trash").open) $("trash").showModal();
  else if (document.activeElement === document.body) $("trash").querySelector("button[type=submit]").focus();
}

function restore(chat) {
  setTrashed(chat, false);
  saveUnsaved();
  announce(`${titleOf(chat)} restored`);
  openTrash();
}

// A button that must be clicked twice.
function confirmButton(label, name, onConfirm) {
  const element = button(label, () => {
    if (element.dataset.armed) return onConfirm();
    element.dataset.armed = "yes";
    element.textContent = "Confirm (cannot be undone)";
    element.setAttribute("aria-label", `Confirm: ${name}. This cannot be undone`);
  }, { className: "plain danger", "aria-label": name });
  element.addEventListener("blur", () => {
    delete element.dataset.armed;
    element.textContent = label;
    element.setAttribute("aria-label", name);
  });
  return element;
}

// ---- files

function openExportMenu() {
  openMenu($("export"), [
    ["All chats as JSON, including all versions", () => download("chats.json", toJson(listed()))],
    ["All chats as JSONL, for fine-tuning", () => download("chats.jsonl", toJsonl(listed()))],
  ]);
}

async function importFiles() {
  const added = [];
  for (const file of $("file").files) {
    try {
      added.push(...readChats(await file.text()).map(receive));
    } catch (error) {
      toast(`Failed to import ${file.name}: ${error.message}.`);
    }
  }
  $("file").value = "";
  if (!added.length) return;
  location.hash = added[0].id;
  toast(added.length === 1 ? "1 chat imported." : `${added.length} chats imported.`);
}

// ---- drawer: a column on wide screens, an overlay on narrow ones

export const isDrawerOpen = () => NARROW.matches && !$("sidebar").inert;

export function setSidebar(isOpen) {
  if (!NARROW.matches) {
    settings.sidebar = isOpen;
    saveSettings();
  }
  showSidebar(isOpen);
  if (isOpen && NARROW.matches) $(isTouch() ? "close-sidebar" : "search").focus();
}

function showSidebar(isOpen) {
  document.body.dataset.sidebar = isOpen ? "open" : "closed";
  $("sidebar").inert = !isOpen;
  $("column").inert = isOpen && NARROW.matches;
  $("backdrop").hidden = !isOpen || !NARROW.matches;
  $("toggle").setAttribute("aria-expanded", String(isOpen));
}

export function closeDrawer() {
  if (!isDrawerOpen()) return;
  showSidebar(false);
  $("toggle").focus();
}

export function toggleSidebar() {
  const isOpen = $("sidebar").inert;
  setSidebar(isOpen);
  if (!isOpen) $("toggle").focus();
}

export function startSidebar() {
  const fit = () => showSidebar(!NARROW.matches && settings.sidebar !== false);
  fit();
  NARROW.addEventListener("change", fit);
  $("toggle").addEventListener("click", toggleSidebar);
  $("close-sidebar").addEventListener("click", toggleSidebar);
  $("backdrop").addEventListener("click", closeDrawer);
  $("search").addEventListener("input", renderList);
  $("search").addEventListener("keydown", (event) => {
    const first = $("chats").querySelector("a");
    if (event.key === "Escape" && $("search").value) {
      event.stopPropagation();
      $("search").value = "";
      renderList();
    } else if (event.key === "Enter" && first) first.click();
    else if (event.key === "ArrowDown" && first) {
      event.preventDefault();
      first.focus();
    }
  });
  $("chats").addEventListener("keydown", moveInList);
  $("import").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", importFiles);
  $("export").addEventListener("click", openExportMenu);
  $("open-trash").addEventListener("click", openTrash);
}

// Arrow keys move in the list, F2 renames, Delete deletes.
function moveInList(event) {
  const links = [...$("chats").querySelectorAll("a")], at = links.indexOf(document.activeElement);
  if (at < 0) return;
  const chat = chats.get(links[at].hash.slice(1));
  const act = {
    ArrowDown: () => links[Math.min(at + 1, links.length - 1)].focus(),
    ArrowUp: () => (at ? links[at - 1] : $("search")).focus(),
    F2: () => startRename(chat),
    Delete: () => {
      const next = (links[at + 1] || links[at - 1])?.id;
      deleteChat(chat); // renders the list again
      (document.getElementById(next) || $("search")).focus();
    },
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

export function focusSearch() {
  if ($("sidebar").inert) setSidebar(true);
  $("search").focus();
}

