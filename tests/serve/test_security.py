"""Foreign hosts and origins, keys, ambiguous requests, large bodies, slow clients."""

import socket
import threading
from contextlib import suppress
from html.parser import HTMLParser

import pytest

from nanochat.serve.security import SecurityConfig
from nanochat.serve.server import ServerConfig
from tests.web_server import CHAT, HELLO, post, serving, until, write_model

KEY = {"Authorization": "Bearer open-sesame"}


def received(connection) -> bytes:
    """All bytes that the server sends until it closes the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(65536):
            found += more
    return found


# ---- V7: hosts, origins, keys --------------------------------------------------------------------


def test_V7_foreign_hosts_and_origins_are_refused(site):
    assert ServerConfig().host == "127.0.0.1"
    evil = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io")
    own = ("localhost", "localhost:1", "127.0.0.1:8000", "[::1]:8000", "192.168.1.7")
    for host in (*evil, *own):
        answer = site.client.get("/v1/models", headers={"Host": host})
        assert answer.status_code == (403 if host in evil else 200), host
    evil = ("https://evil.example", "null", "http://localhost:1", "http://127.0.0.1")
    for origin in (*evil, site.url):
        for method in ("GET", "POST", "OPTIONS"):
            answer = site.client.request(method, "/v1/models", headers={"Origin": origin})
            assert (answer.status_code == 403) == (origin in evil), origin
            assert not any(name.startswith("access-control") for name in answer.headers)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_V7_key_is_required_and_listed_origins_may_call(base, tmp_path):
    write_model("sft:keyed")
    (tmp_path / "key").write_text("open-sesame\n")
    security = SecurityConfig(allow_origins=("https://my.page",), allowed_hosts=("My.Box",))
    with serving("sft:keyed", security=security, api_key_file=str(tmp_path / "key")) as site:
        get = site.client.get
        wrong = ("", "Bearer open", "Basic open-sesame", "Bearer \xe9")
        for given in wrong:
            for path in ("/v1/models", CHAT):
                refused = get(path, headers={b"Authorization": given.encode("latin-1")})
                assert refused.status_code == 401 and refused.headers["www-authenticate"]
        for path in ("/", "/health"):  # the page asks for the key
            assert get(path).status_code == 200
        (base / "report.html").write_text("of this model")  # a browser could not send the key
        assert get("/report").status_code == 404 and '"report"' not in get("/").text
        origin = {"Origin": "https://my.page"}
        asked = {"Access-Control-Request-Headers": "authorization"}
        asked["Access-Control-Request-Method"] = "POST"
        preflight = site.client.options(CHAT, headers={**origin, **asked})
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for head, status in (({**origin, **KEY}, 200), (origin, 401), (KEY, 200)):
            answer = get("/v1/models", headers=head)
            shared = answer.headers.get("access-control-allow-origin")
            assert (answer.status_code, shared) == (status, head.get("Origin"))
        evil = {"Origin": "https://evil.example", **KEY}
        assert get("/v1/models", headers=evil).status_code == 403
        for host in ("my.box", "MY.BOX:80"):
            assert get("/health", headers={"Host": host}).status_code == 200


def test_refused_origins_and_paths_name_the_fix(site):
    for origin in ("null", "file://", "https://a.b"):
        answer = site.client.get("/health", headers={"Origin": origin})
        fix = "add https://a.b to --allow_origins" if "a.b" in origin else "open the page of this"
        assert answer.status_code == 403 and fix in answer.text
    answer = site.client.post("/chat/completions", json={})
    assert answer.status_code == 404 and "use /v1/chat/completions" in answer.text


def test_malformed_hosts_and_origins_are_named():
    with pytest.raises(ValueError, match="my.box:80"):
        SecurityConfig(allowed_hosts=("my.box:80",))
    with pytest.raises(ValueError, match="https://my.page/chat"):
        SecurityConfig(allow_origins=("https://my.page/chat",))


# ---- V16: ambiguous requests ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        "Host: localhost|Content-Length: 2|Transfer-Encoding: chunked",
        "Host: localhost|Transfer-Encoding: chunked|Content-Length: 35",
        "Host: localhost|Content-Length: 2|Content-Length: 3",
        "Host: localhost|Host: evil.example|Content-Length: 2",
        "Host: localhost|Origin: http://localhost|Origin: http://evil.example",
        "Host: localhost|Authorization: Bearer a|Authorization: Bearer b",
        "Host: [::1]evil.example|Content-Length: 2",
        "Host: localhost@evil.example|Content-Length: 2",
        "Host: localhost:80:80|Content-Length: 2",
        "Content-Length: 2",
    ],
)
def test_V16_ambiguous_requests_are_refused_and_closed(site, lines):
    head = [f"POST {CHAT} HTTP/1.1", *lines.split("|"), "Content-Type: application/json"]
    smuggled = "\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with site.raw(("\r\n".join(head) + smuggled).encode()) as connection:
        found = received(connection)
    assert found.count(b"HTTP/1.1 ") == 1  # the second request must not be answered
    assert found.startswith(b"HTTP/1.1 400") and b"onnection: close" in found


def test_V9_policy_of_the_page_allows_only_its_own_code(site):
    policy = site.client.get("/").headers["content-security-policy"]
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == parts["frame-ancestors"] == parts["base-uri"] == "'none'"
    assert all(parts[name].startswith("'sha256-") for name in ("script-src", "style-src"))
    assert " " not in parts["script-src"] + parts["style-src"] and parts["connect-src"] == "'self'"


def test_report_is_linked_and_served_if_there_is_one(base, site):
    (base / "report.html").unlink(missing_ok=True)
    assert site.client.get("/report").status_code == 404
    assert '"report"' not in site.client.get("/").text
    (base / "report.html").write_text("<h1>Scores</h1>")
    answer = site.client.get("/report")
    assert answer.text == "<h1>Scores</h1>" and '"report"' in site.client.get("/").text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


class Tags(HTMLParser):
    """Collects the tags of HTML text, its attributes and the targets of its links."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.names, self.links = set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name == "href"]


def test_V4_V9_markdown_becomes_short_harmless_html(site):
    def render(*answers, status=200):
        got = site.client.post("/v1/markdown", json={"answers": answers})
        assert got.status_code == status and len(got.content) < 2000
        return "".join(got.json().get("html", []))

    evil = (
        "2*3*4 <img src=x onerror> [a](javascript:b) ![c](https://example.org/d*d) <javascript:e>",
        '|a|\n|-:|\n|[b](data:text/html,c "d")|\n\n[e]\n\n[e]: vbscript:f',
        '```" onload=1\n</code><script>\n```\n[a](https://b "\' onclick=c")',
    )
    found = Tags(render(*([{"type": "text", "text": text}] for text in evil)))
    assert found.tags <= set("p a br table thead tbody tr th td pre code".split())
    assert found.names <= {"href", "title", "class", "target", "rel"}
    assert found.links == ["https://example.org/d*d", "https://b"]
    solved = render([{"type": "text", "text": "# Sum\n#### 3\nso\n\n#### 27"}])
    assert "<h4>3</h4>" in solved and solved.endswith('<p class="answer">27</p>\n')
    call = ("text", "`a"), ("python", "<b>"), ("python_output", '"'), ("text", "b`")
    html = render([{"type": kind, "text": text} for kind, text in call])
    assert 'class="call" title="Tool call">&lt;b&gt;</code><code class="result"' in html
    calls = [{"type": "python", "text": f"\ufdd0{i + 2}\ufdd1" * 8} for i in range(6)]
    assert render([{"type": "text", "text": "x"}, *calls]).count("<code") == 6
    inside = ("text", "```"), ("python", '"'), ("text", "\nx\n```\n")  # where a language is named
    assert '<code class="call' not in render([{"type": t, "text": text} for t, text in inside])
    wide = "|a" * 180 + "\n" + "|-" * 180 + "\n|" * 40  # 7,000 cells
    assert "<td" not in render([{"type": "text", "text": wide}])
    assert not render([{"type": "text", "text": "[" * 20_001}], status=413)
    for wrong in ([1] * 300_000, "x", [{"type": "image", "text": ""}]):
        render(wrong, status=400)


# ---- V4, V6: large bodies and slow clients -------------------------------------------------------


def test_V6_slow_and_idle_connections_are_closed(base):
    write_model("sft:slow")
    with serving("sft:slow", SecurityConfig(request_seconds=1.0)) as site:
        start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        slow = [site.raw() for _ in range(60)] + [site.raw(start) for _ in range(60)]
        unfinished = [site.raw(post({"messages": HELLO})[:-4]) for _ in range(20)]
        kept = site.raw(start + b"\r\n")
        assert b"200 OK" in kept.recv(1000)
        kept.sendall(start)
        closed = threading.Event()

        def drip() -> None:
            while not closed.wait(0.2):
                for connection in slow[60:]:
                    with suppress(OSError):
                        connection.sendall(b"a")

        threading.Thread(target=drip, daemon=True).start()
        assert site.content(max_tokens=3) is not None
        for connection in (*slow, kept):
            assert b"HTTP" not in received(connection)
        for connection in unfinished:
            assert b" 408 " in received(connection)
        closed.set()


def test_V4_V6_large_bodies_and_clients_that_do_not_read(base):
    write_model("sft:large", context=1024)
    with serving("sft:large", SecurityConfig(max_body_bytes=200_000, send_seconds=0.5)) as site:
        large = b"x" * 3_000_000
        for content in (large, (large[i : i + 9999] for i in range(0, len(large), 9999))):
            head = {"Content-Type": "application/json"}
            answer = site.client.post(CHAT, content=content, headers=head)
            assert answer.status_code == 413 and "200,000" in answer.json()["error"]["message"]
        # the buffer of the kernel, otherwise megabytes
        site.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with site.raw(post({"messages": HELLO, "stream": True, "n": 8})) as connection:
            until(lambda: site.load()[0] == 8)
            site.wait_until_idle()
            assert b"[DONE]" not in received(connection)
        assert site.content(max_tokens=1) is not None
