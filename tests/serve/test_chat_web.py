"""scripts.chat_web: flags, startup errors and signals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from nanochat.common import REPOSITORY
from nanochat.serve.server import ServerConfig, listen
from scripts.chat_web import suggestions
from tests.web_server import HELLO, write_model


@pytest.fixture
def start(base):
    """Start the script with this base directory; returns process, URL and output."""
    running = []

    def begin(*flags):
        command = [sys.executable, "-m", "scripts.chat_web", "--port=0", "--dtype=float32", *flags]
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "NANOCHAT_BASE_DIR": str(base)},
        )
        running.append(process)
        output = ""
        while "API" not in output and (line := process.stdout.readline()):
            output += line
        found = re.search(r"^page +(http://\S+)$", output, re.MULTILINE)
        assert found, output
        return process, found[1], output

    yield begin
    for process in running:
        process.kill()
        process.wait()


def test_V11_default_flags_serve_latest_stage_until_sigterm(start):
    for name in ("base:d2", "sft:d2", "mid:d2"):
        write_model(name, context=2048, n_layer=4)
    process, url, output = start()
    assert url.startswith("http://127.0.0.1:") and "sft:d2, step 1" in output
    assert "<title>nanochat</title>" in httpx.get(url, timeout=60).text
    listed = httpx.get(f"{url}/v1/models", timeout=60).json()
    assert [model["id"] for model in listed["data"]] == ["sft:d2", "mid:d2", "base:d2"]
    assert listed["defaults"] == {"temperature": 0.6, "top_p": 1.0, "top_k": 50, "max_tokens": 256}
    body = {"messages": HELLO, "stream": True, "max_tokens": 2000, "stop": ["\u4e00\u4e8c"]}
    request = {"method": "POST", "url": f"{url}/v1/chat/completions", "json": body}
    with httpx.stream(**request, timeout=60) as response:
        lines = response.iter_lines()
        while "content" not in next(lines):
            pass
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    finished = "choices" in last and last["choices"][0]["finish_reason"] is not None
    assert finished or last["error"]["code"] == "shutting_down"
    assert process.wait(120) in (0, -signal.SIGTERM)
    assert "Traceback" not in process.stdout.read()


def test_public_address_without_key_prints_a_warning_and_ctrl_c_no_traceback(start):
    write_model("base:d2")
    process, url, output = start("-i", "base", "-s", "1", "--host=0.0.0.0")
    assert "--api_key_file" in output and url.startswith("http://localhost:")
    models = httpx.get(f"{url}/v1/models", timeout=60).json()
    assert models["data"][0]["id"] == "base:d2:1"
    process.send_signal(signal.SIGINT)
    assert process.wait(120) in (0, -signal.SIGINT)
    assert "Traceback" not in process.stdout.read()


def test_port_in_use_is_reported_with_a_fix(base, command):
    write_model()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port={port + 1}" in command.rejects("chat_web", f"--port={port}")


def test_invalid_key_files_are_rejected(tmp_path, command):
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00key")
    for name in ("missing", "empty", "binary"):
        flag = f"--api_key_file={tmp_path / name}"
        assert name in command.rejects("chat_web", "--port=0", flag)


def test_missing_model_error_suggests_speedrun(command):
    assert "bash speedrun.sh" in command.rejects("chat_web", "--port=0")


def test_suggestions_only_for_models_of_the_embedded_dataset():
    class Embedded:
        state = {"source": {"dataset": "embedded"}}

    class Other:
        state = {"source": {"dataset": "owner/name"}}

    assert len(suggestions(Embedded)) == 3 and suggestions(Other) == []


def test_unusable_address_names_the_flag_to_change():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"127\.0\.0\.1:{port} .*try --port={port + 1}"):
            listen(ServerConfig(port=port))
    with pytest.raises(ValueError, match=r"256\.1\.1\.1:8000 .*try --host=127\.0\.0\.1"):
        listen(ServerConfig(host="256.1.1.1"))
