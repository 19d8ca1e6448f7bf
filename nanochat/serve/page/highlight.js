// Syntax highlighting: code -> [class, text] pieces whose concatenation is the code.
//
// One regular expression per language family finds comments, strings, numbers and words. Quotes and
// comments also match if unclosed, and words always match whole, so the time is linear.

const MAX_LENGTH = 100_000; // longer code is not highlighted

const words = (text) => new Set(text.split(" "));

const QUOTED = String.raw`"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?`;
const CHARACTER = String.raw`"(?:[^"\\\n]|\\[^])*"?|'(?:\\[^\n']{1,8}|[^'\\\n])'`;
const TRIPLE = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`;
const TEMPLATE = "`(?:[^`\\\\]|\\\\[^])*`?";
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.[\d_]+)?(?:[eE][+-]?\d+)?)\w*`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;

function family({ comment = "(?!)", string = QUOTED, number = NUMBER, word = WORD }, keywords = "") {
  const source = `(?<c>${comment})|(?<s>${string})|(?<n>${number})|(?<w>${word})`;
  return { pattern: new RegExp(source, "g"), keywords: words(keywords) };
}

const FAMILIES = {
  python: family({ comment: "#[^\\n]*", string: `${TRIPLE}|${QUOTED}` },
    "and as assert async await break case class continue def del elif else except False finally for from " +
    "global if import in is lambda match None nonlocal not or pass raise return True try while with yield"),
  javascript: family({ comment: SLASHES, string: `${QUOTED}|${TEMPLATE}` },
    "abstract any as async await boolean break case catch class const continue default delete do else enum " +
    "export extends false finally for from function get if implements import in instanceof interface let new " +
    "null number of private public readonly return set static string super switch this throw true try type " +
    "typeof undefined unknown var void while yield"),
  c: family({ comment: `${SLASHES}|^[ \\t]*#[a-z]+`, string: CHARACTER },
    "auto bool break case catch char class const constexpr continue default delete do double else enum extern " +
    "false final float for friend goto if inline int long namespace new nullptr operator override private " +
    "protected public return short signed sizeof static struct switch template this throw true try typedef " +
    "typename union unsigned using virtual void volatile while abstract boolean byte extends finally " +
    "implements import instanceof interface null package super throws var record"),
  rust: family({ comment: SLASHES, string: CHARACTER },
    "as async await bool box break char const continue crate dyn else enum extern f32 f64 false fn for i16 " +
    "i32 i64 i8 if impl in isize let loop match mod move mut pub ref return Self self static str struct super " +
    "trait true type u16 u32 u64 u8 unsafe use usize where while"),
  go: family({ comment: SLASHES, string: `${CHARACTER}|\`[^\`]*\`?` },
    "bool break byte case chan const continue default defer else error fallthrough false float64 for func go " +
    "goto if import int interface map nil package range return rune select string struct switch true type var"),
  bash: family({ comment: "(?<=^|\\s)#[^\\n]*", word: "\\$\\{?\\w+\\}?|[A-Za-z_][\\w-]*" },
    "case cd do done echo elif else esac exit export fi for function if in local read return set shift source " +
    "sudo then trap unset until while"),
  json: family({}, "true false null"),
  sql: family({ comment: "--[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)" },
    "select from where and or not insert into values update set delete create table drop alter join left right " +
    "inner outer on group by order having limit as null is in like union all distinct primary key " +
    "SELECT FROM WHERE AND OR NOT INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE DROP ALTER JOIN LEFT RIGHT " +
    "INNER OUTER ON GROUP BY ORDER HAVING LIMIT AS NULL IS IN LIKE UNION ALL DISTINCT PRIMARY KEY"),
  yaml: family({ comment: "(?<=^|\\s)#[^\\n]*" }, "true false null yes no on off"),
  html: family({ comment: "<!--[^]*?(?:-->|$)", string: "(?<==)(?:\"[^\"]*\"?|'[^']*'?)",
    number: "&#?\\w{1,10};", word: "<[/!]?[A-Za-z][\\w:-]*|\\/?>|[A-Za-z_][\\w:-]*" }),
  css: family({ comment: "\\/\\*[^]*?(?:\\*\\/|$)", number: "#[\\da-fA-F]{3,8}\\b|-?\\b\\d[\\d.]*(?:[a-z]+|%)?",
    word: "@?[A-Za-z_-][\\w-]*" }),
};

const NAMES = {
  python: "python py python3 pycon", javascript: "javascript js jsx mjs typescript ts tsx",
  c: "c h cpp c++ cc cxx hpp cuda cu java kotlin kt csharp cs c# swift", rust: "rust rs", go: "go golang",
  bash: "bash sh shell zsh console", json: "json json5 jsonl jsonc", sql: "sql sqlite postgresql mysql",
  yaml: "yaml yml toml ini conf dockerfile makefile", html: "html xml svg vue xhtml", css: "css scss less",
};
const LANGUAGE = new Map(Object.entries(NAMES).flatMap(
  ([name, aliases]) => aliases.split(" ").map((alias) => [alias, name])));

export function highlight(code, language) {
  const name = LANGUAGE.get(language.toLowerCase());
  if (!name || code.length > MAX_LENGTH) return [["", code]];
  const { pattern, keywords } = FAMILIES[name], pieces = [];
  let end = 0;
  for (const found of code.matchAll(pattern)) {
    const text = found[0], after = code[found.index + text.length];
    const kind = Object.entries(found.groups).find(([, value]) => value !== undefined)[0];
    const shade = kind === "w" ? shadeOfWord(text, after, name, keywords) : kind;
    if (!shade) continue;
    if (end < found.index) pieces.push(["", code.slice(end, found.index)]);
    pieces.push([shade, text]);
    end = found.index + text.length;
  }
  if (end < code.length) pieces.push(["", code.slice(end)]);
  return pieces;
}

// Class of a word: "k" keyword, "f" function or key, "" none.
function shadeOfWord(text, after, language, keywords) {
  if (language === "html") return /^[</>]/.test(text) ? "k" : after === "=" ? "f" : "";
  if (language === "css") return text[0] === "@" ? "k" : after === ":" ? "f" : "";
  if (keywords.has(text)) return "k";
  if (text[0] === "$" && language === "bash") return "f";
  return after === "(" && language !== "sql" ? "f" : "";
}
