"""A program that holds a port and answers like a web server: Grafana, in field report R1."""

from __future__ import annotations

import socket
import sys

import setproctitle

ANSWER = b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def main() -> None:
    name, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    setproctitle.setproctitle(f"{name} server --config=/etc/{name}/{name}.ini")
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    server.listen()
    while True:
        connection, _ = server.accept()
        connection.settimeout(2)
        try:
            connection.recv(4096)
            connection.sendall(ANSWER)
        except OSError:
            pass
        finally:
            connection.close()


if __name__ == "__main__":
    main()
