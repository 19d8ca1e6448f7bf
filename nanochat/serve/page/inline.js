// Inline Markdown: text -> tree of strings and {tag, ...} nodes.
//
// A single pass from left to right. Emphasis uses a bounded stack of open delimiters; closing
// delimiters of code and math are found in indexes that are built once. So the time is linear in
// the text and the nesting is bounded.

const MAX_OPEN = 30; // open emphasis delimiters; more are plain text
const MAX_URL = 2048;
const MAX_MATH = 2000;
const SPECIAL = /[\\`*_~[!<$\n]|https?:\/\//g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SYMBOL = /[\p{P}\p{S}]/u;
const isSpace = (c) => c === "" || /\s/.test(c);
const isWord = (c) => c !== "" && !isSpace(c) && !SYMBOL.test(c);

export function parseInline(text, withLinks = true) {
  return new InlineParser(text, withLinks).parse();
}

class InlineParser {
  constructor(text, withLinks) {
    this.text = text;
    this.withLinks = withLinks;
    this.at = 0;
    this.frames = [{ mark: "", count: 0, nodes: [] }]; // open delimiters, outermost first
    this.found = new Map(); // search string -> its next position
  }

  parse() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const next = SPECIAL.exec(text);
      const until = next ? next.index : text.length;
      if (until > this.at) this.add(text.slice(this.at, until));
      this.at = until;
      if (next) this.special(next[0]);
    }
    while (this.frames.length > 1) this.flatten();
    return this.frames[0].nodes;
  }

  add(node) {
    this.frames[this.frames.length - 1].nodes.push(node);
  }

  // Add `node` and advance to `end`.
  take(node, end) {
    this.add(node);
    this.at = end;
  }

  special(c) {
    const handler = {
      "\\": this.backslash, "`": this.code, "$": this.math, "*": this.delimiter, "_": this.delimiter,
      "~": this.delimiter, "[": this.link, "!": this.image, "<": this.angle, "\n": this.newline,
    }[c] || this.bareLink;
    if (!handler.call(this)) this.take(this.text[this.at], this.at + 1);
  }

  // Position of the first `needle` at or after `from`, or -1. Cached: positions only grow, so all
  // searches for a needle together scan the text once.
  next(needle, from) {
    const known = this.found.get(needle);
    if (known !== undefined && (known === -1 || known >= from)) return known;
    const position = this.text.indexOf(needle, from);
    this.found.set(needle, position);
    return position;
  }

  backslash() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "\n") return this.take("\n", this.at + 2) ?? true;
    const close = { "(": "\\)", "[": "\\]" }[next];
    if (close) {
      const end = this.next(close, this.at + 2);
      if (end > this.at + 2 && end - this.at < MAX_MATH) return this.takeMath(end + 2, next === "[");
    }
    if (!PUNCTUATION.test(next)) return false;
    this.take(next, this.at + 2);
    return true;
  }

  takeMath(end, display) {
    this.take({ tag: "math", display, text: this.text.slice(this.at, end) }, end);
    return true;
  }

  newline() {
    const { nodes } = this.frames[this.frames.length - 1];
    const last = nodes.length - 1;
    if (typeof nodes[last] === "string") nodes[last] = nodes[last].trimEnd() || (last ? " " : "");
    this.take("\n", this.at + 1);
    return true;
  }

  code() {
    const length = this.runLength("`"), start = this.at + length;
    const end = this.closingBackticks(length, start);
    if (end < 0) {
      this.take(this.text.slice(this.at, start), start);
      return true;
    }
    let inside = this.text.slice(start, end).replaceAll("\n", " ");
    if (inside.startsWith(" ") && inside.endsWith(" ") && inside.trim()) inside = inside.slice(1, -1);
    this.take({ tag: "code", children: [inside] }, end + length);
    return true;
  }

  runLength(c) {
    let end = this.at;
    while (this.text[end] === c) end++;
    return end - this.at;
  }

  closingBackticks(length, from) {
    if (!this.backticks) {
      this.backticks = new Map(); // run length -> {starts, cursor}
      for (const run of this.text.matchAll(/`+/g)) {
        const runs = this.backticks.get(run[0].length) || { starts: [], cursor: 0 };
        runs.starts.push(run.index);
        this.backticks.set(run[0].length, runs);
      }
    }
    const runs = this.backticks.get(length);
    if (!runs) return -1; // part of a run that was split by an escape
    while (runs.cursor < runs.starts.length && runs.starts[runs.cursor] < from) runs.cursor++;
    return runs.starts[runs.cursor] ?? -1;
  }

  // $$...$$ and $...$. A single dollar opens before a non-space and closes after a non-space, with no
  // letter or digit on its outer side: prices and shell variables are not math.
  math() {
    const { text, at } = this;
    if (text[at + 1] === "$") {
      const end = this.next("$$", at + 2);
      if (end > at + 2 && end - at < MAX_MATH) return this.takeMath(end + 2, true);
      this.take("$$", at + 2);
      return true;
    }
    if (isSpace(text[at + 1] ?? "") || isWord(text[at - 1] ?? "")) return false;
    let end = this.next("$", at + 1);
    while (end > 0 && text[end - 1] === "\\") end = this.next("$", end + 1);
    if (end < 0 || end - at > MAX_MATH) return false;
    if (isSpace(text[end - 1]) || isWord(text[end + 1] ?? "")) return false;
    const inside = text.slice(at + 1, end);
    if (/^[\d.,]/.test(inside) && inside.includes(" ") && !/[\\^_=+*{<>]/.test(inside)) return false;
    return this.takeMath(end + 1, false);
  }

  // Runs of * and _ (emphasis) and ~~ (strikethrough).
  delimiter() {
    const mark = this.text[this.at], count = this.runLength(mark), end = this.at + count;
    const before = this.text[this.at - 1] ?? "", after = this.text[end] ?? "";
    const run = this.text.slice(this.at, end);
    const { opens, closes } = flanks(mark, count, before, after);
    let left = count;
    if (closes) left = this.close(mark, left);
    if (left && opens && this.frames.length <= MAX_OPEN) {
      this.frames.push({ mark, count: left, nodes: [] });
    } else if (left) this.add(run.slice(0, left));
    this.at = end;
    return true;
  }

  // Close the innermost matching frames; returns how many of the run's characters are unused.
  close(mark, count) {
    while (count) {
      const i = this.frames.findLastIndex((frame) => frame.mark === mark);
      if (i < 1) return count;
      while (this.frames.length - 1 > i) this.flatten();
      const frame = this.frames[i], size = Math.min(2, count, frame.count);
      const tag = mark === "~" ? "del" : size === 2 ? "strong" : "em";
      const element = { tag, children: frame.nodes };
      count -= size;
      frame.count -= size;
      if (frame.count) frame.nodes = [element];
      else {
        this.frames.pop();
        this.add(element);
      }
    }
    return 0;
  }

  // Turn the innermost unclosed delimiter into text.
  flatten() {
    const { mark, count, nodes } = this.frames.pop();
    this.add(mark.repeat(count));
    for (const node of nodes) this.add(node);
  }

  // [text](https://...), with nested brackets in the text.
  link() {
    const close = this.withLinks ? this.closingBracket(this.at) : -1;
    const target = close < 0 ? null : destination(this.text, close + 1);
    if (!target) return false;
    const children = parseInline(this.text.slice(this.at + 1, close), false);
    this.take({ tag: "a", href: target.url, children }, target.end);
    return true;
  }

  // Images become links: the page loads nothing from other sites.
  image() {
    if (this.text[this.at + 1] !== "[" || !this.withLinks) return false;
    this.at++;
    if (!this.link()) this.at--;
    else return true;
    return false;
  }

  closingBracket(from) {
    if (!this.brackets) {
      this.brackets = new Map();
      const open = [];
      for (const { 0: c, index } of this.text.matchAll(/\\[^]|[[\]]/g)) {
        if (c === "[") open.push(index);
        else if (c === "]" && open.length) this.brackets.set(open.pop(), index);
      }
    }
    return this.brackets.get(from) ?? -1;
  }

  angle() {
    const rest = this.text.slice(this.at, this.at + MAX_URL);
    const link = /^<(https?:\/\/[^\s<>]+)>/.exec(rest);
    if (link && this.withLinks) {
      this.take({ tag: "a", href: link[1], children: [link[1]] }, this.at + link[0].length);
      return true;
    }
    const lineBreak = /^<br ?\/?>/i.exec(rest);
    if (!lineBreak) return false;
    this.take({ tag: "br", children: [] }, this.at + lineBreak[0].length);
    return true;
  }

  bareLink() {
    if (!this.withLinks || isWord(this.text[this.at - 1] ?? "")) return false;
    const rest = this.text.slice(this.at, this.at + MAX_URL);
    const url = trimUrl(/^https?:\/\/[^\s<>"`\uFDD0]+/.exec(rest)?.[0] || "");
    if (!url) return false;
    this.take({ tag: "a", href: url, children: [url] }, this.at + url.length);
    return true;
  }
}

// Whether a delimiter run can open or close emphasis: CommonMark's flanking rules, except that a
// single * between two words or numbers, or ** between two digits, is text (arithmetic).
function flanks(mark, count, before, after) {
  const none = { opens: false, closes: false };
  if (mark === "~" ? count !== 2 : count > 3) return none;
  const left = !isSpace(after) && (isWord(after) || !isWord(before));
  const right = !isSpace(before) && (isWord(before) || !isWord(after));
  if (mark === "_") {
    return { opens: left && (!right || !isWord(before)), closes: right && (!left || !isWord(after)) };
  }
  if (mark === "*") {
    const product = count === 1 && /[\p{L}\p{N})\]]/u.test(before) && /[\p{L}\p{N}([]/u.test(after);
    if (product || (/\d/.test(before) && /\d/.test(after))) return none;
  }
  return { opens: left, closes: right };
}

// Parse a link target (https://... "title") at `at`: its url and end, or null.
function destination(text, at) {
  const rest = text.slice(at, at + MAX_URL);
  const start = /^\(\s{0,3}<?(?=https?:\/\/)/.exec(rest);
  if (!start) return null;
  let depth = 0, end = start[0].length;
  for (; end < rest.length && !/[\s<>"\uFDD0]/.test(rest[end]); end++) {
    if (rest[end] === "(") depth++;
    else if (rest[end] === ")" && depth-- === 0) break;
  }
  const tail = /^>?(?:\s{1,3}"[^"\n]{0,300}")?\s{0,3}\)/.exec(rest.slice(end, end + 320));
  if (!tail) return null;
  return { url: rest.slice(start[0].length, end), end: at + end + tail[0].length };
}

// Remove trailing punctuation, which belongs to the sentence; a closing parenthesis only if it is
// unbalanced.
function trimUrl(url) {
  let end = url.length;
  let surplus = url.split(")").length - url.split("(").length;
  for (; end > 0; end--) {
    const c = url[end - 1];
    if (c === ")" && surplus > 0) surplus--;
    else if (!/[.,;:!?'*_~\]$]/.test(c)) break;
  }
  return /^https?:\/\/[^\s/]/.test(url.slice(0, end)) ? url.slice(0, end) : "";
}
