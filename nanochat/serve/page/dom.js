// Helpers for elements, toasts, menus and downloads. Text is only ever inserted as text nodes.

export const $ = (id) => document.getElementById(id);

// Create an element; `role` and names with a dash are set as attributes, others as properties.
export function make(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export function button(label, onClick, props = {}) {
  const element = make("button", { type: "button", textContent: label, ...props });
  element.addEventListener("click", onClick);
  return element;
}

// A button with an icon from style.css; the label is its accessible name and tooltip.
export function iconButton(icon, label, onClick, props = {}) {
  const element = button("", onClick, { title: label, "aria-label": label, ...props });
  element.className = `icon-button ${props.className || ""}`.trim();
  element.append(make("span", { className: `icon ${icon}`, "aria-hidden": "true" }));
  return element;
}

export const isTouch = () => matchMedia("(pointer: coarse)").matches;

// Announce text to screen readers.
export function announce(text) {
  $("status").textContent = text;
}

// Show a toast; `onAction` adds a button (Undo by default).
export function toast(text, onAction = null, label = "Undo") {
  const [span, action, dismiss] = $("toast").children;
  span.textContent = text;
  const hide = () => { $("toast").hidden = true; };
  action.hidden = !onAction;
  action.textContent = label;
  action.onclick = () => { hide(); onAction(); };
  dismiss.onclick = hide;
  $("toast").hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(hide, 10000);
}

export function hideToast() {
  $("toast").hidden = true;
}

export async function copyText(text, from) {
  let done = "Copied";
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelection(text); // not HTTPS or localhost: no clipboard API
  } catch (error) {
    done = "Copy failed";
  }
  announce(done);
  from.dataset.note = done;
  setTimeout(() => { delete from.dataset.note; }, 1500);
}

function copySelection(text) {
  const area = make("textarea", { value: text, className: "visually-hidden" });
  const before = document.activeElement;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  before?.focus();
  if (!copied) throw new Error("document.execCommand failed");
}

export function download(name, text) {
  const type = name.endsWith(".jsonl") ? "application/jsonl" : "application/json";
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// Open a menu below (or above) its button. entries: [label, action, class].
export function openMenu(trigger, entries) {
  const menu = $("menu");
  const items = entries.map(([label, action, className = ""]) =>
    button(label, () => { menu.hidePopover(); action(); }, { role: "menuitem", className }));
  menu.replaceChildren(...items);
  menu.onkeydown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Tab") menu.hidePopover();
    if (!step) return;
    event.preventDefault();
    const at = items.indexOf(document.activeElement);
    items[(at + step + items.length) % items.length].focus();
  };
  menu.ontoggle = (event) => {
    trigger.setAttribute("aria-expanded", String(event.newState === "open"));
    if (event.newState === "closed" && document.activeElement === document.body) trigger.focus();
  };
  menu.showPopover();
  const from = trigger.getBoundingClientRect(), size = menu.getBoundingClientRect();
  const below = from.bottom + size.height + 8 < innerHeight;
  menu.style.top = `${Math.max(8, below ? from.bottom + 4 : from.top - size.height - 4)}px`;
  menu.style.left = `${Math.max(8, Math.min(from.left, innerWidth - size.width - 8))}px`;
  items[0].focus();
}
