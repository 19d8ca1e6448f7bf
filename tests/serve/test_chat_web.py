"""scripts.chat_web: flags, startup errors and signals."""

import asyncio
import json
import re
import resource
import signal
import socket

import httpx
import pytest

from nanochat.dist import init_dist
from nanochat.serve.models import ModelLibrary
from tests.training_runs import begin_anew, rest_of
from tests.web_server import CHAT, HELLO, write_model


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A base directory per test."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


def start(base, *flags):
    """Start the script; returns process, client and the text printed so far."""
    process = begin_anew(base, "-m", "scripts.chat_web", "--port=0", "--dtype=float32", *flags)
    shown = ""
    for line in process.stdout:
        shown += line
        if found := re.match(r"API +(http://\S+)/v1$", line):
            return process, httpx.Client(base_url=found[1], timeout=60), shown
    pytest.fail(shown)


def test_V11_default_flags_serve_latest_stage_until_sigterm(base):
    for name in ("base:d2", "sft:d2", "mid:d2"):
        write_model(name, context=2048, n_layer=4)
    process, client, shown = start(base)
    assert client.base_url.host == "127.0.0.1" and "sft:d2, step 1" in shown
    assert "--api_key_file" not in shown and "nanochat" in client.get("/").text
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
    assert "Traceback" not in rest_of(process) and process.returncode in (0, -signal.SIGTERM)


def test_public_address_warns_and_ctrl_c_prints_no_traceback(base):
    write_model("base:d2")
    process, client, shown = start(base, "-i", "base", "-s", "1", "--host=0.0.0.0")
    assert "--api_key_file" in shown and client.base_url.host == "localhost"
    assert client.get("/v1/models").json()["data"][0]["id"] == "base:d2:1"
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in rest_of(process) and process.returncode in (0, -signal.SIGINT)


def test_V6_idle_connections_neither_starve_others_nor_flood_the_log(base):
    write_model()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))  # the server inherits it
    process, client, _ = start(base)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    address = (client.base_url.host, client.base_url.port)
    idle = [socket.create_connection(address) for _ in range(400)]
    assert client.get("/health").status_code == 200
    for connection in idle:
        connection.close()
    process.kill()
    assert "open files" not in rest_of(process)


def test_a_loaded_model_answers_while_another_is_loaded(base):
    write_model()
    library = ModelLibrary(init_dist(), "sft:tiny")

    async def get_twice():
        first = await library.get("sft:tiny", bool)
        async with library.loading:  # as while another one is loaded
            return first is await asyncio.wait_for(library.get("sft:tiny", bool), 60)

    assert asyncio.run(get_twice())


def test_startup_errors_name_the_fix(base, command, tmp_path):
    assert "bash speedrun.sh" in command.rejects("chat_web", "--port=0")
    write_model()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags, fix in (
            ((f"--port={port}",), "--port=0 "),
            (("--host=256.1.1.1",), "--host=127.0.0.1"),
        ):
            assert fix in command.rejects("chat_web", *flags)
    (tmp_path / "empty").write_text("\n")
    for name in ("missing", "empty"):
        flag = f"--api_key_file={tmp_path / name}"
        assert name in command.rejects("chat_web", "--port=0", flag)
