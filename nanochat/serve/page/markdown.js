// Markdown: text -> tree (parseMarkdown) -> elements (MarkdownView).
//
// Blocks: paragraphs, headings, lists, tasks, tables, quotes, rules, fenced code, display math.
// Line breaks are kept. Nested blocks are parsed from lines with their prefix removed, at most
// MAX_DEPTH deep, so the time is linear in the text. Only elements in TAGS are created, and text
// is only inserted as text nodes.

import { button, copyText, make } from "./dom.js";
import { parseInline } from "./inline.js";

const MAX_DEPTH = 10;
const MAX_OPEN_BLOCKS = 30;
const TAGS = new Set(("p h2 h3 h4 h5 h6 ul ol li blockquote hr table thead tbody tr th td strong em del " +
  "code a br").split(" "));
// Placeholder for an object in the text, followed by a character that encodes its number.
const OBJECT = "\uFDD0";
const FIRST_OBJECT = 0xe000;
const OBJECTS = /(\uFDD0[\uE000-\uF8FF])/;
// Final answer line in GSM8K format.
const ANSWER = /^#{4}[ \t]*([-+\u2212]?[$\u20ac\u00a3]?\d[\d.,:/]*[ \t]?%?)$/;

// Placeholder that MarkdownView replaces with `renderObject(number)`.
export const objectMark = (number) => OBJECT + String.fromCharCode(FIRST_OBJECT + number);
export const withoutMarks = (text) => text.replaceAll(OBJECT, "\uFFFD");

export function parseMarkdown(text) {
  return parseBlocks(text.split("\n"), 0);
}

// Parse lines into blocks, each with the `line` it begins at.
function parseBlocks(lines, depth) {
  const blocks = [], rest = { lines, depth, at: 0, lastCloser: {} };
  while (rest.at < lines.length) {
    const line = rest.at;
    if (isBlank(lines[line])) {
      rest.at++;
      continue;
    }
    const block = fencedCode(rest) || heading(rest) || rule(rest) || quote(rest) || displayMath(rest) ||
      list(rest) || table(rest) || paragraph(rest);
    blocks.push({ ...block, line, startsInLine: rest.cutLine === line });
  }
  return blocks;
}

const isBlank = (line) => line.trim() === "";

// Indentation in columns; a tab advances to the next multiple of 4.
function indentOf(line) {
  let columns = 0;
  for (let i = 0; line[i] === " " || line[i] === "\t"; i++) columns += line[i] === "\t" ? 4 - columns % 4 : 1;
  return columns;
}

// Remove up to `columns` of leading white space.
function outdent(line, columns) {
  let i = 0;
  for (let passed = 0; passed < columns && (line[i] === " " || line[i] === "\t"); i++) {
    passed += line[i] === "\t" ? 4 - passed % 4 : 1;
  }
  return line.slice(i);
}

function fenceOf(line) {
  const found = /^\s*(`{3,}|~{3,})([^\uFDD0]*)$/.exec(line);
  return found && !(found[1][0] === "`" && found[2].includes("`")) ? found : null;
}

function closesFence(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function fencedCode(rest) {
  const { lines } = rest, fence = fenceOf(lines[rest.at]);
  if (!fence) return null;
  const indent = indentOf(lines[rest.at]), code = [];
  for (rest.at++; rest.at < lines.length && !closesFence(lines[rest.at], fence[1]); rest.at++) {
    code.push(outdent(lines[rest.at], indent));
  }
  rest.at++;
  return { tag: "code-block", info: fence[2].trim(), text: code.join("\n") };
}

function headingOf(line) {
  return /^ {0,3}(#{1,6})(?=\s|$)/.exec(line);
}

function heading(rest) {
  const line = rest.lines[rest.at], found = headingOf(line);
  const answer = found && ANSWER.exec(line.trim());
  if (answer && rest.depth === 0 && rest.lines.slice(rest.at + 1, rest.at + 9).every(isBlank)) {
    rest.at++;
    return { tag: "answer", text: answer[1].trim() };
  }
  if (!found) return null;
  rest.at++;
  let title = line.slice(found[0].length).trim(), end = title.length;
  while (title[end - 1] === "#") end--;
  if (end === 0 || /\s/.test(title[end - 1])) title = title.slice(0, end).trimEnd();
  return { tag: `h${Math.min(6, found[1].length + 1)}`, children: parseInline(title) };
}

function isRule(line) {
  const text = line.replaceAll(/\s/g, "");
  return text.length >= 3 && "-*_".includes(text[0]) && text === text[0].repeat(text.length);
}

function rule(rest) {
  if (!isRule(rest.lines[rest.at])) return null;
  rest.at++;
  return { tag: "hr", children: [] };
}

const isQuote = (line) => /^ {0,3}>/.test(line);

function quote(rest) {
  const { lines, depth } = rest;
  if (depth >= MAX_DEPTH || !isQuote(lines[rest.at])) return null;
  const inside = [];
  for (; rest.at < lines.length && isQuote(lines[rest.at]); rest.at++) {
    inside.push(lines[rest.at].replace(/^ {0,3}> ?/, ""));
  }
  return { tag: "blockquote", children: parseBlocks(inside, depth + 1) };
}

const CLOSERS = { "$$": "$$", "\\[": "\\]" };

function displayMath(rest) {
  const { lines } = rest, first = lines[rest.at].trimStart();
  const close = CLOSERS[first.slice(0, 2)];
  if (!close) return null;
  rest.lastCloser[close] ??= lines.findLastIndex((line) => line.includes(close));
  const parts = [];
  let line = first, from = 2; // after the opening delimiter
  for (let i = rest.at; i <= rest.lastCloser[close]; i++, line = lines[i], from = 0) {
    const end = line.indexOf(close, from);
    if (end < 0) {
      parts.push(line);
      continue;
    }
    const after = line.slice(end + 2);
    if (i === rest.at && !isBlank(after)) return null; // inside a sentence
    parts.push(line.slice(0, end + 2));
    if (isBlank(after)) i++;
    else {
      lines[i] = after;
      rest.cutLine = i; // a block begins in the middle of this line
    }
    rest.at = i;
    return { tag: "p", children: [{ tag: "math", display: true, text: parts.join("\n") }] };
  }
  return null;
}

// Parse a list marker at the start of a line: indent, number, and the text after it.
function markerOf(line) {
  const text = line.trimStart();
  const found = /^(?:[-*+]|(\d{1,9})[.)])(?=\s|$)/.exec(text);
  if (!found || isRule(line)) return null;
  const after = text.slice(found[0].length), gap = indentOf(after);
  const width = found[0].length + (isBlank(after) || gap > 4 ? 1 : gap);
  const ordered = found[1] !== undefined;
  return { indent: indentOf(line), ordered, number: Number(found[1]), width,
    text: outdent(after, width - found[0].length) };
}

function list(rest) {
  const { lines, depth } = rest, first = depth < MAX_DEPTH && markerOf(lines[rest.at]);
  if (!first) return null;
  const items = [];
  let loose = false, marker = first;
  while (marker && marker.ordered === first.ordered) {
    const { body, blank } = itemLines(rest, marker);
    items.push(body);
    marker = rest.at < lines.length ? markerOf(lines[rest.at]) : null;
    loose ||= blank && marker !== null && marker.ordered === first.ordered;
  }
  const tag = first.ordered ? "ol" : "ul";
  return { tag, start: first.number, children: items.map((body) => listItem(body, depth, loose)) };
}

// Lines of one item without their indent; advances rest.at past them. A line belongs to the item
// if it is indented by two columns or more, or if a code fence is open.
function itemLines(rest, marker) {
  const { lines } = rest, body = [marker.text];
  let blanks = 0, fence = fenceOf(marker.text)?.[1] || null;
  for (rest.at++; rest.at < lines.length; rest.at++) {
    const line = lines[rest.at], indent = indentOf(line);
    if (isBlank(line)) {
      blanks++;
      continue;
    }
    if (!fence && indent < marker.indent + 2) break;
    for (; blanks; blanks--) body.push("");
    body.push(outdent(line, Math.min(indent, marker.indent + marker.width)));
    if (fence) fence = closesFence(line, fence) ? null : fence;
    else fence = fenceOf(line)?.[1] || null;
  }
  return { body, blank: blanks > 0 };
}

function listItem(body, depth, loose) {
  const task = /^\[([ xX])\](?=\s)/.exec(body[0]);
  if (task) body[0] = body[0].slice(4);
  const blocks = parseBlocks(body, depth + 1);
  const children = [];
  const keep = loose || blocks.filter((block) => block.tag === "p").length > 1;
  for (const block of blocks) {
    if (block.tag === "p" && !keep) children.push(...block.children);
    else children.push(block);
  }
  return { tag: "li", children, task: task && task[1] !== " " ? "done" : task ? "open" : null };
}

// Column alignments of a table at `at` (a row with |, then one dash cell per column), or null.
function alignmentsAt(lines, at) {
  const below = lines[at + 1];
  if (below === undefined || !lines[at].includes("|") || !/^[\s|:-]+$/.test(below)) return null;
  const cells = cellsOf(below);
  if (cells.length !== cellsOf(lines[at]).length || !cells.every((cell) => /^:?-+:?$/.test(cell))) return null;
  return cells.map((cell) => (cell.endsWith(":") ? (cell[0] === ":" ? "center" : "right") : cell[0] === ":" ? "left" : ""));
}

function cellsOf(line) {
  const text = line.trim(), cells = [];
  let start = text[0] === "|" ? 1 : 0;
  for (let i = start; i <= text.length; i++) {
    if (text[i] === "\\") i++;
    else if (i === text.length ? start < i || !cells.length : text[i] === "|") {
      cells.push(text.slice(start, i).trim().replaceAll("\\|", "|"));
      start = i + 1;
    }
  }
  return cells;
}

function table(rest) {
  const { lines } = rest, alignments = alignmentsAt(lines, rest.at);
  if (!alignments) return null;
  const row = (line, tag) => {
    const cells = cellsOf(line), last = alignments.length - 1;
    if (cells.length > last + 1) cells.splice(last, Infinity, cells.slice(last).join(" | "));
    return { tag: "tr", children: cells.map((cell, i) => ({ tag, align: alignments[i], children: parseInline(cell) })) };
  };
  const head = row(lines[rest.at], "th"), body = [];
  for (rest.at += 2; rest.at < lines.length && lines[rest.at].includes("|"); rest.at++) {
    if (startsBlock(lines, rest.at)) break;
    body.push(row(lines[rest.at], "td"));
  }
  return { tag: "table", children: [{ tag: "thead", children: [head] }, { tag: "tbody", children: body }] };
}

// Whether a line interrupts the paragraph above it.
function startsBlock(lines, at) {
  const line = lines[at];
  if (fenceOf(line) || headingOf(line) || isQuote(line) || isRule(line)) return true;
  const marker = markerOf(line), trimmed = line.trim();
  if (marker && !isBlank(marker.text) && (!marker.ordered || marker.number === 1)) return true;
  return trimmed === "$$" || trimmed === "\\[" || alignmentsAt(lines, at) !== null;
}

function paragraph(rest) {
  const { lines } = rest, text = [];
  do text.push(lines[rest.at++].trimStart());
  while (rest.at < lines.length && !isBlank(lines[rest.at]) && !startsBlock(lines, rest.at));
  const open = /^\s*(?:\$\$|\\\[)/.test(text[0]); // display math not closed yet
  return { tag: "p", children: parseInline(text.join("\n").trimEnd()), open };
}

// ---- tree -> elements

// Renders text that may grow. If the new text extends the previous one, only the last two blocks are
// rendered again: later text cannot change earlier blocks. The exception is unclosed display math:
// blocks from there on are rendered again (at most MAX_OPEN_BLOCKS).
export class MarkdownView {
  constructor(renderObject = () => document.createTextNode("")) {
    this.element = make("div", { className: "body" });
    this.renderObject = renderObject;
    this.reset();
  }

  reset() {
    this.text = "";
    this.offset = 0; // start of the blocks that may still change
    this.count = 0; // number of elements before them
    this.element.replaceChildren();
  }

  update(text) {
    if (!text.startsWith(this.text.slice(0, this.offset))) this.reset();
    this.text = text;
    const lines = text.slice(this.offset).split("\n");
    const lengths = lines.map((line) => line.length + 1); // display math may shorten a line
    const blocks = parseBlocks(lines, 0);
    while (this.element.childNodes.length > this.count) this.element.lastChild.remove();
    for (const block of blocks) this.element.append(this.build(block));
    const open = blocks.findIndex((block, i) => block.open && i >= blocks.length - MAX_OPEN_BLOCKS);
    let stable = Math.min(blocks.length - 2, open < 0 ? Infinity : open);
    while (stable > 0 && blocks[stable].startsInLine) stable--;
    if (stable <= 0) return;
    this.count += stable;
    for (let i = 0; i < blocks[stable].line; i++) this.offset += lengths[i];
  }

  build(node) {
    if (node.tag === "code-block") return this.codeBlock(node);
    if (node.tag === "math") {
      const math = make("span", { className: node.display ? "math display" : "math" });
      this.addText(math, node.text);
      return math;
    }
    if (node.tag === "answer") {
      return make("p", { className: "answer" }, make("span", { textContent: "Answer: " }), make("strong", { textContent: node.text }));
    }
    if (!TAGS.has(node.tag)) throw new Error(`no element for ${node.tag}`);
    const element = make(node.tag);
    if (node.tag === "a") {
      Object.assign(element, { href: node.href, title: node.href, target: "_blank", rel: "noopener noreferrer nofollow" });
    } else if (node.tag === "ol") element.start = node.start;
    else if (node.task) {
      element.className = "task";
      element.append(make("input", { type: "checkbox", disabled: true, checked: node.task === "done", "aria-label": node.task }));
    } else if (node.align) element.className = node.align;
    for (const child of node.children) {
      if (typeof child === "string") this.addText(element, child);
      else element.append(this.build(child));
    }
    return node.tag === "table" ? make("div", { className: "table" }, element) : element;
  }

  addText(parent, text) {
    if (!text.includes(OBJECT)) return parent.append(text);
    for (const piece of text.split(OBJECTS)) {
      if (OBJECTS.test(piece)) parent.append(this.renderObject(piece.charCodeAt(1) - FIRST_OBJECT));
      else if (piece) parent.append(piece);
    }
  }

  codeBlock({ info, text }) {
    const code = make("code");
    this.addText(code, text);
    const copier = button("Copy", () => copyText(text, copier), { className: "quiet" });
    copier.setAttribute("aria-label", "Copy code");
    return make("figure", { className: "code" },
      make("figcaption", {}, make("span", { textContent: info || "code" }), copier),
      make("pre", {}, code));
  }
}
