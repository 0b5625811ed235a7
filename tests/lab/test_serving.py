"""`nanovllm lab`: a built site for this machine, or a sentence how to get one.

Run: pytest tests/lab
"""

import http.client
import socket
import struct
import threading

import pytest

from nanovllm.topics.lab.serving import new_server
from nanovllm.topics.server import cli


def test_without_a_site_the_command_says_how_to_build_it(capsys, tmp_path):
    with pytest.raises(SystemExit) as info:
        cli.main(["lab", str(tmp_path)])
    assert info.value.code == 2
    said = capsys.readouterr().err
    assert "has no lab.html" in said and "python -m tutorials.site" in said


@pytest.mark.parametrize("port", [-1, 65536, None])
def test_a_port_that_cannot_be_is_refused(port, capsys, tmp_path):
    """None: one that another program uses."""
    taken = socket.create_server(("127.0.0.1", 0))
    port = port or taken.getsockname()[1]
    (tmp_path / "lab.html").write_text("the lab", encoding="utf-8")
    with pytest.raises(SystemExit) as info:
        cli.main(["lab", str(tmp_path), f"--port={port}"])
    assert info.value.code == 2
    assert capsys.readouterr().err.startswith(f"nanovllm: port={port}: ")


def test_a_built_site_is_served_to_this_machine(tmp_path, capfd):
    """Without a word, also if a tab is closed while it loads."""
    (tmp_path / "lab.html").write_bytes(b"x" * 2**24)
    for name in ("a.js", "c.wasm"):
        (tmp_path / name).write_bytes(b"x")
    with new_server(str(tmp_path), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        server.daemon_threads = False  # waited for
        try:
            with socket.create_connection(server.server_address) as tab:
                tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                tab.sendall(b"GET /lab.html HTTP/1.0\r\n\r\n")
                tab.recv(1)
            assert server.server_address[0] == "127.0.0.1"
            types = {}
            for name in ("lab.html", "a.js", "c.wasm", "../secret"):
                connection = http.client.HTTPConnection(*server.server_address, timeout=30)
                connection.request("GET", f"/{name}")
                response = connection.getresponse()
                types[name] = response.status, response.headers["Content-Type"].partition(";")[0]
                connection.close()
        finally:
            server.shutdown()
            thread.join()
    assert types == {
        "lab.html": (200, "text/html"),
        "a.js": (200, "text/javascript"),
        "c.wasm": (200, "application/wasm"),
        "../secret": (404, "text/html"),
    }
    assert capfd.readouterr() == ("", "")
