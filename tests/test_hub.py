"""Hub failures: rate limits, timeouts, login pages, missing permissions, deleted files."""

import io
import json
import threading
import time
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import hub
from nanochat.common import UsageError, read_json
from nanochat.dataset import DataConfig, open_source
from tests.hub_server import use_endpoint

NAME, COMMIT = "owner/texts", "c0ffee" + "0" * 34
SHARD = "b.parquet"
KINDS = ("info", "tree", "head", "get")  # requests made when a file is first read


def shard() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": ["one", "two"]}), buffer)
    return buffer.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Two parquet files at one commit; each entry of `server.faults[kind]` replaces one reply."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.partition("?")[0]
        kind = "info" if "/revision/" in path else "tree" if "/tree/" in path else "file"
        kind = {"HEAD": "head", "GET": "get"}[self.command] if kind == "file" else kind
        self.server.counts[kind] += 1
        faults = self.server.faults.get(kind)
        if faults:
            return (faults.pop(0) if len(faults) > 1 or not self.server.forever else faults[0])(
                self
            )
        if kind == "info":
            return self.answer(200, {"id": NAME, "sha": COMMIT, "tags": [], "private": False})
        content = shard()
        if kind == "tree":
            names = self.server.names
            files = [{"type": "file", "path": n, "size": len(content), "oid": "0"} for n in names]
            return self.answer(200, files)
        headers = {"ETag": '"0123"', "X-Repo-Commit": COMMIT, "Content-Type": "binary/octet-stream"}
        self.answer(200, content, headers)

    do_HEAD = do_GET

    def answer(self, status, body=b"", headers=None):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        standard = {"Content-Type": "application/json", "Content-Length": len(body)}
        self.send_response(status)
        for name, value in {**standard, **(headers or {})}.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def served(monkeypatch):
    """A local server used as the Hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda request, address: None  # clients may leave: print no traceback
    server.faults, server.counts, server.forever = {}, Counter(), False
    server.names = ["a.parquet", SHARD]
    server.closing = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    use_endpoint(server.url, monkeypatch)
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def pauses(monkeypatch):
    """List of pauses; sleeping takes no time but advances the clock."""
    slept, real = [], time.monotonic
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: real() + sum(slept))
    return slept


def status(code, headers=None, error=None, body=b"{}"):
    """A fault: reply with a status and a Hub API error code."""
    extra = {"X-Error-Code": error} if error else {}
    return lambda handler: handler.answer(code, body, {**extra, **(headers or {})})


def page(handler):
    handler.answer(
        200, b"<html>Log in to the hotel's network</html>", {"Content-Type": "text/html"}
    )


def bare_page(handler):
    handler.answer(200, b"<html>Log in to the hotel's network</html>", {"Content-Type": None})


def redirect(handler):
    if handler.path.startswith("/login"):
        return page(handler)
    handler.answer(
        302, headers={"Location": f"http://localhost:{handler.server.server_port}/login"}
    )


def silence(handler):
    handler.server.closing.wait(8)
    handler.close_connection = True


def read_shard():
    source = open_source(DataConfig(dataset=NAME))
    path = source.fetch(SHARD)
    assert path is not None and path.read_bytes() == shard()
    return source


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["seconds", "date", "ratelimit"])
def test_R35_waits_out_minutes_of_rate_limiting(served, pauses, capsys, kind, form):
    def busy(handler):
        headers = {
            "seconds": {"Retry-After": 30},
            "date": {"Retry-After": formatdate(time.time() + 31, usegmt=True)},
            "ratelimit": {"RateLimit": '"api";r=0;t=30'},
        }[form]
        status(429, headers)(handler)

    served.faults[kind] = [busy] * 10
    read_shard()
    assert 280 <= sum(pauses) <= 400 and len(pauses) == 10
    output = capsys.readouterr().out
    assert output.count(": 429 ") == 10 and "retrying in 3" in output and "limit 15 min" in output


@pytest.mark.parametrize("kind", KINDS)
def test_R35_retries_end_after_15_minutes_and_name_the_fix(served, pauses, kind):
    served.faults[kind], served.forever = [status(503)], True
    with pytest.raises(UsageError, match=r"(?s)15 min.*503.*run the same command again"):
        read_shard()
    assert 800 <= sum(pauses) <= 900
    assert max(pauses) <= 75 and pauses[0] < 2 < pauses[3], "pauses grow up to a limit"
    assert len(set(pauses[-5:])) == 5, "with jitter"


def test_R35_retry_after_beyond_the_limit_fails_at_once(served, pauses):
    served.faults["info"] = [status(429, {"Retry-After": 7200})]
    with pytest.raises(UsageError, match="Retry-After: 7200 s"):
        read_shard()
    assert not pauses


def test_R35_retry_after_zero_still_pauses(served, pauses):
    served.faults["info"] = [status(429, {"Retry-After": 0}) for _ in range(5)]
    read_shard()
    assert len(pauses) == 5 and min(pauses) >= hub.PAUSE_SECONDS


@pytest.mark.parametrize("kind", KINDS)
def test_R35_unresponsive_hub_times_out(served, pauses, monkeypatch, capsys, kind):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 60.0)
    served.faults[kind], served.forever = [silence], True
    began = time.perf_counter()
    with pytest.raises(UsageError, match="(?s)timed out.*run the same command again"):
        read_shard()
    assert "timed out" in capsys.readouterr().out
    assert served.counts[kind] > 2 and time.perf_counter() - began < 60


REFUSALS = {
    "gated": (status(403, error="GatedRepo"), "is gated.*hf auth login"),
    "forbidden": (status(403), "403.*hf auth login"),
    "unauthorized": (status(401, error="RepoNotFound"), "private.*hf auth login"),
    "bad token": (
        status(401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
        "token.*hf auth login",
    ),
    "bad request": (status(400), "failed .*Bad.*HF_ENDPOINT"),
    "login page": (page, "no valid Hub response.*HF_ENDPOINT"),
    "page without a type": (bare_page, "no valid Hub response.*HF_ENDPOINT"),
    "redirect to a login page": (redirect, "no valid Hub response.*HF_ENDPOINT"),
    "no commit": (status(404, error="RevisionNotFound"), "no .*set revision|NANOCHAT_BASE_DIR"),
}


# Left out: sent in place of a file, a page without a type has the wrong size and counts as
# truncated
REFUSED = [(k, c) for k in KINDS for c in REFUSALS if (k, c) != ("get", "page without a type")]


@pytest.mark.parametrize(("kind", "case"), REFUSED)
def test_R35_permanent_error_is_one_line_with_the_fix(served, pauses, base, kind, case):
    fault, message = REFUSALS[case]
    served.faults[kind], served.forever = [fault], True
    with pytest.raises(UsageError, match=f"(?s){message}") as refusal:
        read_shard()
    why, fix = refusal.value.args
    assert "\n" not in why + fix and fix
    assert not pauses, "none of these is retried"
    check_nothing_is_pinned(base)
    served.faults.clear()
    read_shard()


def check_nothing_is_pinned(base):
    assert not list(base.rglob("*.parquet"))
    for manifest in base.rglob("manifest.json"):
        assert not any("sha256" in file for file in read_json(manifest)["files"].values())


@pytest.mark.parametrize("kind", ["head", "get"])
def test_R35_deleted_file_is_named(served, base, kind):
    served.faults[kind] = [status(404, error="EntryNotFound")]
    fix = "delete the dataset's folder.*another revision"
    with pytest.raises(UsageError, match=f"(?s){SHARD}.*{COMMIT}.*{fix}"):
        read_shard()
    check_nothing_is_pinned(base)


def test_R35_error_names_deleted_pinned_commit(served, base):
    open_source(DataConfig(dataset=NAME))
    served.faults["head"] = [status(404, error="RevisionNotFound")]
    with pytest.raises(UsageError, match=f"(?s){NAME} no longer has commit {COMMIT}.*BASE_DIR"):
        read_shard()
    check_nothing_is_pinned(base)


def test_R35_offline_mode_error_lists_offline_options(served, monkeypatch, base):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="(?s)HF_HUB_OFFLINE.*--dataset=embedded"):
        read_shard()
    check_nothing_is_pinned(base)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    source = read_shard()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert read_shard() == source, "downloaded files need no network"
    with pytest.raises(UsageError, match="(?s)HF_HUB_OFFLINE.*--dataset=embedded"):
        source.fetch("a.parquet")


def test_R35_malformed_response_is_rejected(served, pauses, base):
    for kind in ("info", "tree"):
        for body in (b"[]", b"3", b'{"a": 1}', b'[{"type": "file"}]'):
            served.faults[kind] = [status(200, body=body)]
            if (kind, body) != ("tree", b"[]"):  # a repository without files
                with pytest.raises(UsageError, match="no valid Hub response"):
                    read_shard()
    assert not list(base.rglob("manifest.json"))


def test_R35_file_of_wrong_size_is_not_pinned(served, pauses, base):
    short = {"ETag": '"0123"', "X-Repo-Commit": COMMIT, "Content-Type": "binary/octet-stream"}
    for kind in ("head", "get"):
        served.faults[kind] = [status(200, short, body=b"half")]
    served.forever = True
    with pytest.raises(ValueError, match="4 bytes, but the listing says"):
        read_shard()
    check_nothing_is_pinned(base)


@pytest.mark.parametrize("name", ["../up.parquet", "/root.parquet", "x/../../y.parquet"])
def test_listed_path_outside_the_folder_is_rejected(served, base, name):
    served.names.append(name)
    with pytest.raises(UsageError, match="unsafe path"):
        read_shard()
    assert not list(base.rglob("manifest.json"))


def test_R35_invalid_repository_name_is_rejected(served, pauses):
    with pytest.raises(UsageError, match="not a valid repository name"):
        open_source(DataConfig(dataset="owner/te xts"))
    assert not pauses and not served.counts


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "https://"])
def test_R35_wrong_endpoint_is_a_usage_error(monkeypatch, pauses, url):
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 5.0)
    use_endpoint(url, monkeypatch)
    with pytest.raises(UsageError):
        read_shard()
    assert bool(pauses) == url.endswith(":1"), "only a valid URL is retried"


def test_R35_command_exits_without_a_traceback(served, command, monkeypatch):
    served.faults["info"] = [page]
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    found = command.rejects("data", f"--dataset={NAME}", "--download_only")
    assert "no valid Hub response" in found and "HF_ENDPOINT" in found
