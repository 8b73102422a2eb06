"""The cluster's name server: dns_server.py ADDRESS FILE answers queries for A records from lines "name
address" of the file, which it reads anew each time. It knows no other names, and no other types."""

import socket
import struct
import sys

NAME_ERROR = 3


def question_of(query):
    """The name that is asked for, the type, and where the question ends."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
        at += 1 + query[at]
    (kind,) = struct.unpack_from(">H", query, at + 1)
    return ".".join(labels), kind, at + 5


def answer(query, records):
    name, kind, end = question_of(query)
    addresses = records.get(name, []) if kind == 1 else []
    code = 0 if name in records else NAME_ERROR
    header = query[:2] + struct.pack(">HHHHH", 0x8580 | code, 1, len(addresses), 0, 0)
    answers = b"".join(
        struct.pack(">HHHIH", 0xC00C, 1, 1, 1, 4) + socket.inet_aton(address)
        for address in addresses
    )
    return header + query[12:end] + answers


def read_records(path):
    records = {}
    with open(path) as file:
        for line in file:
            name, address = line.split()
            records.setdefault(name, []).append(address)
    return records


def main(address, path):
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))
    print("ready", flush=True)
    while True:
        query, peer = server.recvfrom(4096)
        server.sendto(answer(query, read_records(path)), peer)


if __name__ == "__main__":
    main(*sys.argv[1:])
