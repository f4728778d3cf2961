"""A real headless Chromium over its DevTools protocol: pages are opened, asked and clicked as by a user.

async with chromium(tmp_path) as browser:
    page = await browser.open("http://127.0.0.1:8010/")
    assert await page.evaluate("document.title") == "Now"
    assert page.complaints == []
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no Chromium is installed. Fix: apt-get install chromium"
DEADLINE_S = 20.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root; the page is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)

_UNTIL = """new Promise((done, failed) => {
    const end = performance.now() + %f;
    const look = () => {
        const found = (%s);
        if (found) done(found);
        else if (performance.now() > end) failed(new Error("it never held: " + %s));
        else requestAnimationFrame(look);
    };
    look();
})"""


class PageError(Exception):
    """The page's own script failed, or what was waited for did not come."""


class Page:
    """complaints: what its console says as a warning or an error. requests: every address that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def read(self) -> None:
        """Takes what the browser says, until the connection ends."""
        async for message in self._socket:
            content = msgspec.json.decode(message.data)
            if (answer := self._answers.pop(content.get("id"), None)) is not None:
                answer.set_result(content)
            else:
                self._note(content.get("method"), content.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(part.get("value", part)) for part in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(msgspec.json.encode({"id": number, "method": method, "params": params}).decode())
        content = await asyncio.wait_for(answer, DEADLINE_S)
        if "error" in content:
            raise PageError(f"{method}: {content['error']['message']}")
        return content["result"]

    async def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        found = await self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise PageError(found["exceptionDetails"]["exception"].get("description", script))
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """Waits until the expression is true; its value. It is looked at in each frame of the browser."""
        return await self.evaluate(_UNTIL % (1e3 * (DEADLINE_S - 2), script, msgspec.json.encode(script).decode()))

    async def goto(self, address: str) -> None:
        await self.command("Page.navigate", url=address)

    async def size(self, width: int, height: int) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def screenshot(self) -> bytes:
        """What is in view, as a PNG."""
        found = await self.command("Page.captureScreenshot", format="png")
        return base64.b64decode(found["data"])


class Browser:
    def __init__(self, address: str, session: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        self._address, self._session, self._group = address, session, group
        self.readers: list[asyncio.Task[None]] = []

    async def open(self, address: str, *, width: int = 1400, height: int = 1000) -> Page:
        async with self._session.put(f"{self._address}/json/new?about:blank") as response:
            target = await response.json()
        socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 28)
        page = Page(socket)
        self.readers.append(self._group.create_task(page.read(), name="page"))
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.command(f"{domain}.enable")
        await page.size(width, height)
        await page.goto(address)
        return page


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Browser]:
    """folder: for its profile."""
    assert PROGRAM is not None, MISSING
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *FLAGS,
        f"--user-data-dir={folder / 'chromium'}",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        address = await asyncio.wait_for(_address(process.stderr), DEADLINE_S)
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            drain = group.create_task(_drain(process.stderr), name="chromium-messages")
            browser = Browser(address, session, group)
            yield browser
            for task in (*browser.readers, drain):
                task.cancel()
    finally:
        process.kill()
        await process.wait()


async def _address(messages: asyncio.StreamReader) -> str:
    async for line in messages:
        if b"DevTools listening on ws://" in line:
            return "http://" + line.decode().split("ws://")[1].split("/")[0]
    raise PageError("Chromium ended before it listened")


async def _drain(messages: asyncio.StreamReader) -> None:
    async for _ in messages:
        pass
