"""Markdown rendering of the chat page in a real browser, without a server."""

import pytest

from nanochat.serve.server import PAGE, PAGE_POLICY, PAGE_TYPES

ADDRESS = "http://page.test"


def serve(route):
    """Serve a page file with the page's Content-Security-Policy."""
    name = route.request.url.removeprefix(f"{ADDRESS}/page/")
    if name == f"{ADDRESS}/":
        return route.fulfill(content_type="text/html", body="")
    headers = {"content-security-policy": PAGE_POLICY}
    path = PAGE / name
    route.fulfill(content_type=PAGE_TYPES[path.suffix], body=path.read_bytes(), headers=headers)


@pytest.fixture(scope="module")
def page(browser):
    context = browser.new_context()
    context.route("**", serve)
    found = context.new_page()
    found.goto(f"{ADDRESS}/")
    yield found
    context.close()


# text -> expected elements, formatted by outline()
MARKDOWN = {
    "one\ntwo": "p[one\ntwo]",
    "one\n\ntwo": "p[one] p[two]",
    "*a* _b_ **c** __d__ ***e*** ~~f~~": "p[em[a] em[b] strong[c] strong[d] em[strong[e]] del[f]]",
    "snake_case_name 3*4*5 a * b ** c": "p[snake_case_name 3*4*5 a * b ** c]",
    "**bold *and* more** *open": "p[strong[bold em[and] more] *open]",
    r"\*a\* \_b\_ \# \[c\\": "p[*a* _b_ # [c\\]",
    "`a*b*` ``c`d`` `open": "p[code[a*b*] code[c`d] `open]",
    "# A #\n### B": "h2[A] h4[B]",
    "#tag": "p[#tag]",
    "---\n***": "hr[] hr[]",
    "- a\n- b": "ul[li[a] li[b]]",
    "- a\n  - b\n    1. c\n- d": "ul[li[a ul[li[b ol[li[c]]]]] li[d]]",
    "1. a\n\n   more\n\n   ```\n   code\n   ```\n2. b": "ol[li[p[a] p[more] code[code]] li[b]]",
    "1. a\n   - x\n2. b": "ol[li[a ul[li[x]]] li[b]]",
    "3. a\n4. b": "ol:3[li[a] li[b]]",
    "- a\n1. b": "ul[li[a]] ol[li[b]]",
    "- [x] a\n- [ ] b": "ul[li[done a] li[open b]]",
    "> a\n> - b\n> > c": "blockquote[p[a] ul[li[b]] blockquote[p[c]]]",
    "| a | b |\n|:-:|--:|\n| 1 | `2` |": "table[thead[tr[th:center[a] th:right[b]]] "
    "tbody[tr[td:center[1] td:right[code[2]]]]]",
    "a | b\n-|-\nx\\|y | z\n\nend": "table[thead[tr[th[a] th[b]]] tbody[tr[td[x|y] td[z]]]] p[end]",
    "a | b\nno table": "p[a | b\nno table]",
    "```python\n*a*\n\n# b\n```": "code:python[*a*\n\n# b]",
    "~~~\n```\n~~~": "code[```]",
    "```\nopen": "code[open]",
    "[t](https://a.b/c_(d))": "p[a:https://a.b/c_(d)[t]]",
    '[*t*](http://a.b "title")': "p[a:http://a.b[em[t]]]",
    "see https://a.b/c_d_e. (https://a.b)": "p[see a:https://a.b/c_d_e[https://a.b/c_d_e]. "
    "(a:https://a.b[https://a.b])]",
    "<https://a.b/>": "p[a:https://a.b/[https://a.b/]]",
    "![i](https://a.b/i.png)": "p[a:https://a.b/i.png[i]]",
    "[t](javascript:x) <javascript:x> <b>": "p[[t](javascript:x) <javascript:x> <b>]",
    "$x_1*y_2$ and $a*b$": "p[math[$x_1*y_2$] and math[$a*b$]]",
    r"\(a_b_c\) \[d*e*f\]": r"p[math[\(a_b_c\)] math[\[d*e*f\]]]",
    "$$\na\n\n- b\n$$\nend": "p[math[$$\na\n\n- b\n$$]] p[end]",
    "$$\na\n\n- b\n$$ tail\nnext": "p[math[$$\na\n\n- b\n$$]] p[tail\nnext]",
    "It costs $5 and $6, or US$7.": "p[It costs $5 and $6, or US$7.]",
    "$HOME/$PATH": "p[$HOME/$PATH]",
    "a<br>b": "p[abr[]b]",
    "#### 44": "answer[Answer: 44]",
    "#### -1,234.5\n": "answer[Answer: -1,234.5]",
    "#### 44 plums": "h5[44 plums]",
    "#### 44\nmore": "h5[44] p[more]",
}
OUTLINE = """async (text) => {
  const { MarkdownView } = await import("/page/markdown.js");
  const view = new MarkdownView();
  view.update(text);
  const BLOCK = /^(UL|OL|LI|P|H\\d|HR|TABLE|THEAD|TBODY|TR|T[HD]|BLOCKQUOTE|FIGURE|DIV)$/;
  const inside = (node) => [...node.childNodes].reduce((found, child) => {
    if (child.nodeType === 3) return found + child.data;
    return found + (found && BLOCK.test(child.tagName) ? " " : "") + outline(child);
  }, "");
  const outline = (e) => {
    const name = e.tagName.toLowerCase();
    if (name === "figure") {
      const language = e.querySelector("figcaption span").textContent;
      const head = language === "code" ? "code" : `code:${language}`;
      return `${head}[${e.querySelector("pre").textContent}]`;
    }
    if (name === "div") return inside(e);
    if (name === "input") return e.checked ? "done " : "open ";
    if (e.classList.contains("math")) return `math[${e.textContent}]`;
    if (e.classList.contains("answer")) return `answer[${e.textContent}]`;
    const details = { a: () => e.getAttribute("href"), ol: () => (e.start === 1 ? "" : e.start) };
    const detail = (details[name] || (() => e.className.replace("task", "")))();
    return `${name}${detail ? ":" + detail : ""}[${inside(e)}]`;
  };
  return inside(view.element);
}"""


def test_markdown_renders_to_expected_elements(page):
    found = {text: page.evaluate(OUTLINE, text) for text in MARKDOWN}
    assert found == MARKDOWN


def test_incremental_rendering_equals_full_rendering(page):
    text = "\n\n".join(MARKDOWN) + "\n"
    differences = page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("/page/markdown.js");
          const growing = new MarkdownView(), differences = [];
          for (let end = 0; end <= text.length; end++) {
            growing.update(text.slice(0, end));
            if (end % 7 && end < text.length) continue;
            const whole = new MarkdownView();
            whole.update(text.slice(0, end));
            const isEqual = growing.element.isEqualNode(whole.element);
            if (!isEqual) differences.push(text.slice(0, end).slice(-80));
          }
          return differences;
        }""",
        text,
    )
    assert differences == []


HOSTILE = [
    "*a ",
    "**a*",
    "_a",
    "`a",
    "``a`",
    "[",
    "[a](",
    "[a](https://",
    "$5 a ",
    "\\[\n",
    "\\(",
    "$$ a\n",
]
HOSTILE += [
    ">",
    "> ",
    "- ",
    "- a\n ",
    "  - a\n",
    "1. ",
    "|",
    "|a\n|-\n",
    "<https://",
    "https://)",
    "~~a",
    "\\",
]
HOSTILE += [
    "#",
    "-",
    " ",
    "\t",
    "```\n- ",
    "- ```\n",
    "*_~`[$<",
    "![",
    "#### 4\n",
    "(",
    "a\n",
    "&",
    "\ufdd0",
]
HOSTILE += ["```c\n'", "```js\n`", '```html\n<a b="', "```css\na-", '```py\n"""', "```sh\n#"]


def test_hostile_markdown_takes_linear_time(page):
    slow = page.evaluate(
        """async (units) => {
          const { MarkdownView } = await import("/page/markdown.js");
          const milliseconds = (unit, length) => {
            const head = /^```[a-z]+\\n|/.exec(unit)[0], body = unit.slice(head.length);
            const text = head + body.repeat(length / body.length);
            const started = performance.now();
            new MarkdownView().update(text);
            return performance.now() - started;
          };
          // 8x the text takes 8x the time if linear, 64x if quadratic. Other load only adds time,
          // so one good measurement out of several is enough.
          const isSlow = (unit) => {
            const long = milliseconds(unit, 160_000);
            const short = () => Math.min(...[0, 1, 2].map(() => milliseconds(unit, 20_000)));
            return long > 50 && long > 24 * short();
          };
          return units.filter((unit) => [...Array(10)].every(() => isSlow(unit)));
        }""",
        HOSTILE,
    )
    assert slow == []


def test_nesting_is_bounded(page):
    depth = page.evaluate(
        """async (texts) => {
          const { MarkdownView } = await import("/page/markdown.js");
          const depth = (e) => 1 + Math.max(0, ...[...e.children].map(depth));
          return texts.map((text) => {
            const view = new MarkdownView();
            view.update(text);
            return depth(view.element);
          });
        }""",
        [unit * 3000 for unit in ("> ", "- ", "1. ", "*a **b ", "[a", "~~a _b ")]
        + ["".join("  " * i + "- a\n" for i in range(300))],
    )
    assert max(depth) < 80
