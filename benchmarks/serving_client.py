"""The clients of serving.py, a process of their own: they import nothing that takes long.

Many connections that stay open, each with one request at a time. Reads the requests from standard input and writes what
was measured to standard output, both as JSON.

    python benchmarks/serving_client.py http://127.0.0.1:8000 256 < requests.json
"""

from __future__ import annotations

import asyncio
import json
import sys
import time


async def ask(address: str, connections: int, given: list[dict[str, str]]) -> dict[str, float]:
    """Requests a second, and times to an answer."""
    name, port = address.removeprefix("http://").split(":")
    queue, times = iter(given), []

    async def one() -> None:
        reader, writer = await asyncio.open_connection(name, int(port))
        for each in queue:
            body = json.dumps(each).encode()
            head = f"POST /predict HTTP/1.1\r\nHost: {name}\r\nContent-Type: application/json\r\n"
            begin = time.perf_counter()
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            said = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = next(
                int(line.split(b":")[1]) for line in said.split(b"\r\n") if line.startswith(b"content-length")
            )
            answer = await reader.readexactly(length)
            if not said.startswith(b"http/1.1 200"):
                raise SystemExit(f"refused: {answer.decode()}")
            times.append(time.perf_counter() - begin)
        writer.close()

    begin = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(connections)))
    seconds = time.perf_counter() - begin
    times.sort()
    return {
        "requests_per_second": len(times) / seconds,
        "median_ms": 1e3 * times[len(times) // 2],
        "p99_ms": 1e3 * times[int(0.99 * len(times))],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))))
