"""Requests recorded from client programs, and malicious ones."""

import json
import threading

import pytest

from nanochat.chat_format import render_prompt
from nanochat.common import REPOSITORY, read_json
from nanochat.serve import server
from nanochat.serve.openai_api import (
    ApiError,
    ChatRequest,
    TextRequest,
    read_messages,
    read_request,
)
from nanochat.serve.security import SecurityConfig
from tests.web_server import HELLO, post, serving, write_model

RECORDED = read_json(REPOSITORY / "tests" / "client_requests.json")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base directory shared by all tests in this module."""
    folder = tmp_path_factory.mktemp("requests") / "base"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def site(base):
    write_model(context=1024)
    with serving() as found:
        yield found


# ---- V14: recorded requests ----------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_V14_recorded_client_requests_succeed(site, name):
    body = {**RECORDED[name], "max_tokens": 4, "max_completion_tokens": 4}
    if body.get("stream"):
        chunks = site.stream(**body)
        assert not any("error" in chunk for chunk in chunks)
        finish = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    else:
        answer = site.client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        finish = [answer.json()["choices"][0]["finish_reason"]]
    assert finish[-1] in ("stop", "length")


def test_V14_allowed_tools_mode_auto_is_accepted(site):
    limits = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    assert site.chat(tool_choice=limits, max_tokens=1).status_code == 200
    limits["allowed_tools"]["mode"] = "required"
    assert site.chat(tool_choice=limits, max_tokens=1).status_code == 400


def test_V14_last_assistant_message_is_continued(site):
    messages = [*HELLO, {"role": "assistant", "content": "Hi, I am"}]
    expected = len(render_prompt(site.tokenizer, messages, continue_last=True))
    for body in (
        {"messages": messages},
        {"messages": messages, "truncation": "auto"},
        {"messages": messages, "continue_final_message": True, "add_generation_prompt": False},
    ):
        answer = site.client.post(CHAT, json={**body, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens"] == expected


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no function calling"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "no function calling"),
        ({"function_call": {"name": "f"}}, "function_call", "no function calling"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported; omit"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "not supported; omit"),
        ({"echo": True}, "echo", "not supported; omit"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 stop strings, got 17"),
        ({"stop": [1]}, "stop.0", "string"),
        ({"sing": True}, "sing", "Unrecognized request argument supplied: sing"),
        ({"temperature": 3}, "temperature", "2"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "Unrecognized"),
    ],
)
def test_V14_error_names_unsupported_fields(site, body, param, message):
    rejected(site, {"messages": HELLO, **body}, param, message)


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"content": [PICTURE]}, "messages.0.content.0", "'image_url' are not supported; use text"),
        ({"content": [SOUND]}, "messages.0.content.0", "'input_audio' are not supported; use"),
        ({"content": [{"type": "text", "text": 3}]}, "messages.0.content.0.text", "a number"),
        ({"content": [{"type": "text", "text": "x", "y": 1}]}, "messages.0.content.0.y", "Unrec"),
        ({"content": None}, "messages.0.content", "not null"),
        ({}, "messages.0.content", "not null"),
        ({"content": 5}, "messages.0.content", "not a number"),
        ({"content": "x", "sing": 1}, "messages.0.sing", "Unrecognized"),
        ({"content": "x", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls", "no function"),
        ({"role": "tool", "content": "x"}, "messages.0.role", "no function calling"),
        ({"content": "x", "parts": []}, "messages.0.parts", "Unrecognized"),
        ({"content": "x", "\ud800": 1}, "messages.0.\\ud800", "Unrecognized"),
        ({"role": "root", "content": "x"}, "messages.0.role", "one of developer, system"),
    ],
)
def test_V14_error_has_path_of_invalid_message(site, given, param, message):
    rejected(site, {"messages": [{"role": "user", **given}]}, param, message)


def rejected(site, body, param, message):
    answer = site.client.post(CHAT, content=json.dumps(body), headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


# ---- V4: invalid requests ------------------------------------------------------------------------

BAD = {
    "no messages": {"messages": None},
    "empty messages": {"messages": []},
    "messages of wrong type": {"messages": "hello"},
    "user tool call": {
        "messages": [{"role": "user", "content": [{"type": "python", "text": "1"}]}]
    },
    "temperature negative": {"temperature": -0.1},
    "temperature string": {"temperature": "1"},
    "temperature true": {"temperature": True},
    "temperature huge": {"temperature": 10**400},
    "max_tokens zero": {"max_tokens": 0},
    "max_tokens negative": {"max_tokens": -5},
    "max_tokens huge": {"max_tokens": 10**30},
    "max_tokens fraction": {"max_tokens": 1.5},
    "n zero": {"n": 0},
    "n huge": {"n": 10**9},
    "top_p too high": {"top_p": 1.1},
    "seed huge": {"seed": 2**70},
}


@pytest.mark.parametrize("name", BAD)
def test_V4_invalid_settings_are_rejected_with_a_reason(site, name):
    answer = site.chat(**BAD[name])
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert len(error["message"]) > 10
    site.seconds_until_idle()
    assert site.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"messages":' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 10_000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        json.dumps({"messages": HELLO, "metadata": 0}).encode()[:-2]
        + b"[" * 3000
        + b"]" * 3000
        + b"}",
    ],
    ids=range(11),
)
def test_V4_malformed_json_bodies_are_rejected(site, body):
    answered = site.client.post(CHAT, content=body, headers=JSON)
    assert answered.status_code in (200, 400) and (answered.status_code == 400 or b"[[[" in body)
    assert site.chat(max_tokens=1).status_code == 200


# ---- V13: large bodies ---------------------------------------------------------------------------

LARGE = {
    "bad messages": (CHAT, {"messages": [1] * 300_000}, "at most 4096 messages, got 300,000"),
    "bad parts": (CHAT, {"messages": [{"role": "user", "content": [1] * 300_000}]}, "at most 1024"),
    "bad stop strings": (CHAT, {"messages": HELLO, "stop": [1] * 300_000}, "at most 16"),
    "bad roles": (CHAT, {"messages": [{"role": 1}] * 4096}, "messages.0.role"),
    "prompts": (TEXT, {"prompt": ["x"] * 200_000}, "at most 1024 prompts, got 200,000"),
    "bad prompts": (TEXT, {"prompt": [[]] * 9 + [{}] * 200_000}, "at most 1024 prompts"),
    "bad ids": (TEXT, {"prompt": [1] + ["x"] * 200_000}, "prompt.0: must be"),
    "unknown keys": (CHAT, {"messages": HELLO, **{f"k{i}": 1 for i in range(80_000)}}, "at most"),
    "null keys": (CHAT, {"messages": HELLO, **dict.fromkeys(map(str, range(80_000)))}, "at most"),
    "unknown keys of a message": (
        CHAT,
        {"messages": [{**HELLO[0], **{f"k{i}": 1 for i in range(80_000)}}]},
        "at most 128 fields",
    ),
    "unknown keys of options": (
        CHAT,
        {"messages": HELLO, "stream_options": {f"k{i}": 1 for i in range(80_000)}},
        "at most 128 fields",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_V13_large_invalid_body_gets_one_short_error(site, name):
    path, body, message = LARGE[name]
    data = json.dumps(body, separators=(",", ":")).encode()
    assert len(data) <= 2**20
    answer = site.client.post(path, content=data, headers=JSON)
    assert answer.status_code == 400 and len(answer.content) < 1000
    assert message in answer.json()["error"]["message"]


def test_V13_bodies_are_parsed_off_the_event_loop(site, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    plain = server.read_request

    def slow(kind, body):
        begun.set()
        assert go_on.wait(60)
        return plain(kind, body)

    monkeypatch.setattr(server, "read_request", slow)
    for path in (CHAT, TEXT):
        with site.raw() as sent:
            sent.sendall(post(path, {"messages": HELLO, "prompt": "x", "max_tokens": 1}))
            assert begun.wait(60)
            assert site.client.get("/health").status_code == 200  # while parsing
            go_on.set()
            assert sent.recv(100).startswith(b"HTTP/1.1 400")  # each has an unknown field
        begun.clear()
        go_on.clear()


def test_V13_parsing_stops_at_the_first_error():
    class Counted(dict):
        reads = 0

        def get(self, *names):
            Counted.reads += 1
            return super().get(*names)

    with pytest.raises(ApiError, match=r"messages\.1\.role"):
        read_messages([HELLO[0], *[Counted(role="root")] * 4000])
    assert Counted.reads == 1


def test_read_request_parses_all_input_forms():
    body = {"messages": HELLO, "stop": "x", "stream_options": {"include_usage": True, "y": None}}
    request = read_request(ChatRequest, json.dumps(body).encode())
    assert request.messages == HELLO and request.stop == ("x",)
    assert request.stream_options and request.stream_options.include_usage
    for prompt, found in (
        ("x", ["x"]),
        ([1, 2], [[1, 2]]),
        (["x", "y"], ["x", "y"]),
        ([[1], [2]], [[1], [2]]),
        ([[]], [[]]),
    ):
        assert read_request(TextRequest, json.dumps({"prompt": prompt}).encode()).prompt == found
    for prompt in ([], [True], [1.5], {}, None, [["x"]], [[1], "x", None]):
        with pytest.raises(ApiError, match="prompt"):
            read_request(TextRequest, json.dumps({"prompt": prompt}).encode())


# ---- V16: ambiguous requests (request smuggling) -------------------------------------------------


def exchange(site, request: bytes) -> bytes:
    """Send a request; return all bytes the server sends until it closes the connection."""
    with site.raw() as sent:
        sent.sendall(request)
        received = b""
        while more := sent.recv(65536):
            received += more
        return received


@pytest.mark.parametrize(
    "lines",
    [
        ["Host: localhost", "Content-Length: 2", "Transfer-Encoding: chunked"],
        ["Host: localhost", "Transfer-Encoding: chunked", "Content-Length: 35"],
        ["Host: localhost", "Content-Length: 2", "Content-Length: 3"],
        ["Host: localhost", "Host: evil.example", "Content-Length: 2"],
        ["Host: localhost", "Origin: http://localhost", "Origin: http://evil.example"],
        ["Host: localhost", "Authorization: Bearer a", "Authorization: Bearer b"],
        ["Host: [::1]evil.example", "Content-Length: 2"],
        ["Host: localhost@evil.example", "Content-Length: 2"],
        ["Host: localhost:80:80", "Content-Length: 2"],
        ["Host: local host", "Content-Length: 2"],
        ["Content-Length: 2"],
    ],
    ids=lambda lines: "; ".join(lines),
)
def test_V16_ambiguous_requests_are_rejected_and_closed(site, lines):
    smuggled = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = [f"POST {CHAT} HTTP/1.1", *lines, "Content-Type: application/json"]
    received = exchange(site, "\r\n".join(head).encode() + b"\r\n\r\n" + smuggled)
    assert received.count(b"HTTP/1.1 ") == 1, received  # not the smuggled one
    assert received.startswith(b"HTTP/1.1 400") and b"onnection: close" in received


def test_head_and_options_follow_http_semantics(site):
    for path in ("/", "/page/chat.js", "/health", "/v1/models"):
        got, headed = site.client.get(path), site.client.head(path)
        assert headed.status_code == 200 and not headed.content
        assert headed.headers["content-length"] == got.headers["content-length"]
    for path, methods in (("/health", "GET, HEAD, OPTIONS"), (CHAT, "OPTIONS, POST")):
        options = site.client.options(path)
        assert (options.status_code, options.headers["allow"]) == (204, methods)
        other = site.client.delete(path)
        assert (other.status_code, other.headers["allow"]) == (405, methods)
    assert site.client.options("/nowhere").status_code == 404


def test_allowed_origins_can_use_the_api(base, tmp_path):
    (tmp_path / "key").write_text("open sesame")
    security = SecurityConfig(allow_origins=("https://my.page",), allowed_hosts=("My.Box",))
    with serving(security=security, api_key_file=str(tmp_path / "key")) as site:
        origin = {"Origin": "https://my.page"}
        headers = {
            **origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
            "Access-Control-Request-Private-Network": "true",
        }
        preflight = site.client.options(CHAT, headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://my.page"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        key = {"Authorization": "Bearer open sesame"}
        for headers, status in (({**origin, **key}, 200), (origin, 401)):
            answer = site.client.get("/v1/models", headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://my.page"
        foreign = {"Origin": "https://evil.example", **key}
        rejected = site.client.get("/v1/models", headers=foreign)
        assert rejected.status_code == 403 and "access-control-allow-origin" not in rejected.headers
        for host in ("my.box", "MY.BOX:80", "My.Box"):
            answer = site.client.get("/health", headers={"Host": host})
            assert answer.status_code == 200


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_hosts": ("http://my.box",)},
        {"allowed_hosts": ("my.box:80",)},
        {"allow_origins": ("my.page",)},
        {"allow_origins": ("https://My.Page",)},
        {"allow_origins": ("https://my.page:443",)},
        {"allow_origins": ("https://my.page/chat",)},
    ],
)
def test_malformed_hosts_and_origins_are_rejected(settings):
    with pytest.raises(ValueError, match=r"invalid allow\w+ '"):
        SecurityConfig(**settings)
