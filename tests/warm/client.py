# The body of the programs that ``tests.warm`` writes, after a line that says ADDRESS and KINDS: asks for a fork, waits
# for it. What is neither a script nor of one of the KINDS is for a Python of its own.
import json
import os
import select
import signal
import socket
import sys

arguments = sys.argv[1:]
while arguments[:1] in (["-u"], ["-W"]):
    del arguments[0]
if not arguments or (arguments[0].startswith("-") and arguments[0] not in KINDS):  # type: ignore[name-defined]  # noqa: F821
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect(ADDRESS)  # type: ignore[name-defined]  # noqa: F821
asked = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environ": dict(os.environ)}).encode()
socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
server.sendall(asked)
process = int.from_bytes(server.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(process, number))
while not select.select([server], [], [], 0.5)[0]:  # a signal just before a wait is passed on after it
    pass
status = server.recv(4)
code = int.from_bytes(status, "big", signed=True) if status else -signal.SIGKILL
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
