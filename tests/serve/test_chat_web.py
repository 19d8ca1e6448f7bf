"""scripts.chat_web: flags, startup errors and signals."""

import json
import re
import resource
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from nanochat.common import REPOSITORY
from tests.web_server import CHAT, HELLO, until, write_model


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A base directory per test."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.fixture
def start(base, tmp_path):
    """Start the script, after `prepare`; returns process, client and output file."""
    running, log = [], tmp_path / "output"

    def begin(*flags, prepare=None):
        command = [sys.executable, "-m", "scripts.chat_web", "--port=0", "--dtype=float32", *flags]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=output, stderr=output, preexec_fn=prepare
            )
        running.append(process)
        until(lambda: "API" in log.read_text() or process.poll() is not None)
        found = re.search(r"^page +(http://\S+)$", log.read_text(), re.MULTILINE)
        assert found, log.read_text()
        return process, httpx.Client(base_url=found[1], timeout=60), log

    yield begin
    for process in running:
        process.kill()
        process.wait()


def test_V11_default_flags_serve_latest_stage_until_sigterm(start):
    for name in ("base:d2", "sft:d2", "mid:d2"):
        write_model(name, context=2048, n_layer=4)
    process, client, log = start()
    assert client.base_url.host == "127.0.0.1" and "sft:d2, step 1" in log.read_text()
    assert "--api_key_file" not in log.read_text() and "nanochat" in client.get("/").text
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["sft:d2", "mid:d2", "base:d2"]
    assert listed["defaults"] == {"temperature": 0.6, "top_p": 1.0, "top_k": 50, "max_tokens": 256}
    body = {"messages": HELLO, "stream": True, "max_tokens": 2000}
    with client.stream("POST", CHAT, json=body) as response:
        lines = filter(None, response.iter_lines())
        while "content" not in next(lines):
            pass
        process.send_signal(signal.SIGTERM)
        *_, last, done = lines
    event = json.loads(last.removeprefix("data: "))
    assert done == "data: [DONE]"
    assert "choices" in event or event["error"]["code"] == "shutting_down"
    assert process.wait(120) in (0, -signal.SIGTERM) and "Traceback" not in log.read_text()


def test_public_address_warns_and_ctrl_c_prints_no_traceback(start):
    write_model("base:d2")
    process, client, log = start("-i", "base", "-s", "1", "--host=0.0.0.0")
    assert "--api_key_file" in log.read_text() and client.base_url.host == "localhost"
    assert client.get("/v1/models").json()["data"][0]["id"] == "base:d2:1"
    process.send_signal(signal.SIGINT)
    assert process.wait(120) in (0, -signal.SIGINT) and "Traceback" not in log.read_text()


def test_V6_idle_connections_neither_starve_others_nor_flood_the_log(start):
    write_model()
    files = resource.RLIMIT_NOFILE
    _, client, log = start(prepare=lambda: resource.setrlimit(files, (256, 256)))
    address = (client.base_url.host, client.base_url.port)
    idle = [socket.create_connection(address) for _ in range(400)]
    assert client.get("/health").status_code == 200
    for connection in idle:
        connection.close()
    assert "open files" not in log.read_text()


def test_startup_errors_name_the_fix(base, command, tmp_path):
    assert "bash speedrun.sh" in command.rejects("chat_web", "--port=0")
    write_model()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags, fix in (
            ((f"--port={port}",), f"--port={port + 1}"),
            (("--host=256.1.1.1",), "--host=127.0.0.1"),
            (("--temperature=3",), "at most 2"),
        ):
            assert fix in command.rejects("chat_web", *flags)
    (tmp_path / "empty").write_text("\n")
    for name in ("missing", "empty"):
        flag = f"--api_key_file={tmp_path / name}"
        assert name in command.rejects("chat_web", "--port=0", flag)
