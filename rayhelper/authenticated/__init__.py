"""Connections between processes that know one key: nothing of a stranger's bytes is parsed, nothing is unpickled.

sealing.py    the handshake in which both sides prove that they know the key, and messages that carry a code each
server.py     a thread that answers questions, however many visitors are silent
client.py     the side that asks
meeting.py    a table of names and values on a server: where processes learn of each other, also torch's groups
"""
