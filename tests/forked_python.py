"""
Start Python by forking the process of tests/zygote.py, from a shell script:

    python -S tests/forked_python.py <its connection> -m scripts.base_train ...

Takes the place of `python` in a test's script. Standard error joins the output.
"""

import json
import os
import socket
import sys

read, status = os.pipe()
connection = socket.socket(fileno=int(sys.argv[1]))
request = json.dumps([sys.argv[2:], dict(os.environ)]).encode()
socket.send_fds(connection, [request], [sys.stdout.fileno(), status])
connection.recv(16)
os.close(status)
sys.exit(int(os.read(read, 16)) & 0xFF)
